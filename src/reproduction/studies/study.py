"""A study is a YAML file: rows to train, the paper's values of them, and which are compared.

The paper's tables and sweeps lie in paper/, studies of your own in results/; all have this form.
A row is a cell, or a sweep if it lists values: then each combination of them is a cell.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from pydantic import BeforeValidator, Field

from reproduction.compose import (
    RunPlan,
    compose,
    expand,
    hydra_errors,
    key_of,
    last_part,
    plan_run,
    read_override,
)
from reproduction.config import (
    CONF_DIR,
    LONGEST_NAME,
    Config,
    Count,
    FolderName,
    Whole,
    schema,
    validated,
)
from reproduction.errors import UserError
from reproduction.files import cut
from reproduction.identity import changes_result, digest, row_hash, run_hash
from reproduction.studies.runs import OUTCOMES, Outcome, outcome_of

PAPER_FOLDER = Path(__file__).parent / "paper"
PAPERS = (
    "table1",
    "table2",
    "table3",
    "table4",
    "table5",
    "sweep-tau",
    "sweep-rho",
    "sweep-kappa",
)
OWN_KEYS = ("seed", "devices", "name", "output_root", "resume")  # of a run, not of a study
WARNING = """\
WARNING: these runs have other settings than the study, so their values say nothing of its rows, \
and must not be compared with printed ones."""
FULL = "full"
SMOKE = "smoke"
# Four batches of eight images, tested on forty.
SHORT = [
    "recipe.epochs=1",
    "recipe.batch_size=8",
    "recipe.precision=float32",
    "recipe.log_every=1",
    "recipe.max_steps=4",
    "recipe.warmup_epochs=0",
    "dataset=digits",
    "dataset.root=null",
    "dataset.limit=null",
    "dataset.eval_limit=40",
    "dataset.workers=0",
    "output_root=outputs/smoke",
]
# An untrained model finds every sample difficult and attends evenly, so HTM would mix nothing.
MIXING = ["augmentation.htm.tau=inf", "augmentation.htm.rho=0"]
Printed = dict[Literal["top1", "top5"], float]  # percent, on the test set

# --- the file -----------------------------------------------------------------------------------


def _mapping_of(row: Any) -> Any:
    """Returns a row as a mapping; it may be written as a list of overrides alone."""
    if isinstance(row, list):
        return {"overrides": row}
    return row


def _tested(named: Any) -> Outcome | None:
    """Returns the outcome of a name; of none there is none, and one that was read stays."""
    if named is None or isinstance(named, Outcome):
        return named
    return outcome_of(str(named))


@schema
class StudyRow:
    """What a study says of a row."""

    overrides: list[str]  # of train.py, some of which may list values
    row: str = ""  # its text in a table, unless it is a sweep
    column: str = ""  # the title of the part of the table that has it
    printed: Printed = Field(default_factory=dict)
    against: str | None = None  # the name of the row that it is compared with
    # untested: the difference has no p; primary: Holm's correction leaves its p as it is
    role: Literal["", "untested", "primary"] = ""


@schema
class Study:
    """The content of the file."""

    title: str
    about: str = ""
    overrides: list[str] = Field(default_factory=list)  # of all rows
    rows: dict[FolderName, Annotated[StudyRow, BeforeValidator(_mapping_of)]] = Field(min_length=1)
    seeds: Count = 3  # how many
    # Only runs with the seeds that a command asks for count: from this one on, `seeds` of them
    # unless it says how many.
    first_seed: Whole = 0
    # The outcome by which rows are tested; without it the accuracy, as `judged_by` chooses.
    tested: Annotated[Outcome | None, BeforeValidator(_tested)] = None
    smoke: list[str] = Field(default_factory=list)  # more overrides, at this scale
    notes: list[str] = Field(default_factory=list)

    def __post_init__(self) -> None:
        for name, row in self.rows.items():
            for override in self.overrides + row.overrides:
                if key_of(override) in OWN_KEYS:
                    rule = f"a study must not set {key_of(override)}"
                    raise ValueError(f"rows.{name}: {override}: {rule}")
            others = [other for other in self.rows if other != name]
            if row.against is not None and row.against not in others:
                allowed = ", ".join(others) or "left out, as there is no other row"
                raise ValueError(f"rows.{name}.against={row.against}: must be one of {allowed}")


def studies(name: str) -> dict[str, Study]:
    """Returns the studies of a name: `table1`, `table1/ROW`, `sweep-tau`, `all`, a .yaml file."""
    if name.endswith(".yaml"):
        return {name: read(Path(name))}
    if name == "all":
        return {paper: read(PAPER_FOLDER / f"{paper}.yaml") for paper in PAPERS}
    table, _, row = name.partition("/")
    if table not in PAPERS:
        raise UserError(f"study={name}: must be one of {', '.join(PAPERS)}, all, FILE.yaml")
    study = read(PAPER_FOLDER / f"{table}.yaml")
    if row and row not in study.rows:
        raise UserError(f"study={name}: must be one of {', '.join(study.rows)}")
    if row:  # alone, so there is none that it could be compared with
        study = replace(study, rows={row: replace(study.rows[row], against=None)})
    return {table: study}


def read(path: Path) -> Study:
    """Reads a study; UserError names the file, the key and what is wrong with it."""
    try:
        with hydra_errors():
            content = OmegaConf.to_container(OmegaConf.load(path))
        return validated(Study, content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


# --- what is trained of it ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is trained of a study: a row, or one combination of the values of a sweep."""

    study: str
    row: str  # its name in the study
    name: str  # its own, which has the values of a sweep
    spec: StudyRow
    overrides: list[str]
    values: Mapping[str, Any]  # by key, of a row that is a sweep

    @property
    def label(self) -> str:
        """Names it in lists and folders."""
        return f"{self.study}/{self.name}"

    @property
    def text(self) -> str:
        """What a table shows of it."""
        if self.spec.row and not self.values:  # a sweep is shown by its values
            return self.spec.row
        return self.name


def cells(name: str, study: Study) -> list[Cell]:
    """Returns what is trained of a study, which was typed by this name."""
    expanded = {row: expand(study.overrides + study.rows[row].overrides) for row in study.rows}
    num_sweeps = sum(len(plans) > 1 for plans in expanded.values())
    found = []
    for row, plans in expanded.items():
        differ = [len(set(overrides)) > 1 for overrides in zip(*plans, strict=True)]
        for overrides in plans:
            swept = [
                override for override, differs in zip(overrides, differ, strict=True) if differs
            ]
            parts = swept_texts(swept)
            if not swept or num_sweeps > 1:
                parts.insert(0, row)
            cell = Cell(
                study=Path(name).stem,
                row=row,
                name=",".join(parts),
                spec=study.rows[row],
                overrides=overrides,
                values={key_of(x): read_override(x).value() for x in swept},
            )
            found.append(cell)
    return found


def swept_texts(overrides: Sequence[str]) -> list[str]:
    """Returns swept overrides by the short names of their keys."""
    names = short_names([key_of(override) for override in overrides])
    typed = [override.partition("=")[2] for override in overrides]
    return [f"{name}={value}" for name, value in zip(names, typed, strict=True)]


def short_names(keys: Sequence[str]) -> list[str]:
    """Returns keys without their groups, but for those that would look alike."""
    number = Counter(map(last_part, keys))
    names = []
    for key in keys:
        name = last_part(key)
        if number[name] > 1:
            name = key.removeprefix("augmentation.")
        names.append(name)
    return names


def comparisons(name: str, trained: Sequence[Cell]) -> dict[str, str]:
    """Returns the label of the cell that each one is compared with, by its own label.

    A row is compared with one that is no sweep, or with the plan of the same values of a sweep.
    UserError for a comparison that cannot be made.
    """
    pairs = {}
    for cell in trained:
        against = cell.spec.against
        if against is None:
            continue
        bases = [base for base in trained if base.row == against]
        fitting = [base for base in bases if base.values in ({}, cell.values)]
        if not fitting:
            rule = "is a sweep, and a sweep is compared with one over the same values"
            raise UserError(f"{name}: rows.{cell.row}.against={against}: {rule}")
        pairs[cell.label] = fitting[0].label
    return pairs


@dataclass(frozen=True, kw_only=True)
class Part:
    """The rows and seeds of a study that a command asks for, with what it changes in them."""

    name: str  # of the study: table1, or the path of a file
    study: Study
    is_whole_of_the_paper: bool  # all of one of its studies, as it has it
    cells: list[Cell]
    pairs: Mapping[str, str]  # label of a cell -> of the one that it is compared with
    configs: Mapping[str, Config]  # of each cell, by its label
    seeds: list[int]
    changes: list[str]  # overrides of all rows, which make other runs of those that it names

    @cached_property
    def row_hashes(self) -> dict[str, str]:
        """What the runs of the seeds of each cell share, by its label."""
        return {label: row_hash(config) for label, config in self.configs.items()}

    @property
    def file(self) -> str:
        """The name of its files, by the study, its rows and seeds."""
        stem = Path(self.name).stem
        if self.is_whole_of_the_paper:
            return stem
        tail = f"-{digest([self.name, self.row_hashes, self.seeds])}"
        return cut(stem, LONGEST_NAME, tail)

    @property
    def about(self) -> list[str]:
        """Says what distinguishes the runs from those that the study names, with a warning."""
        if not self.changes:
            return []
        texts = ", ".join(f"`{override}`" for override in self.changes)
        return [WARNING, f"With {texts}; seeds {', '.join(map(str, self.seeds))}."]


def planned(
    name: str, seeds: int | None, scale: str, more: Sequence[str]
) -> tuple[list[RunPlan], list[Part]]:
    """Returns all runs of the studies of a name, seed by seed, and the studies.

    Rows of the same configuration share a run. UserError for an override of all rows that sets
    what one of them is about.
    """
    plans: dict[str, RunPlan] = {}
    parts = []
    for study_name, study in studies(name).items():
        has_all_rows = name in ("all", study_name)
        part, runs = part_of(study_name, study, seeds, scale, more, has_all_rows)
        parts.append(part)
        for plan in runs:
            plans.setdefault(run_hash(plan.config), plan)
    by_seed = sorted(plans.values(), key=lambda plan: plan.config.seed)
    return [plan.placed(number) for number, plan in enumerate(by_seed)], parts


def part_of(
    name: str,
    study: Study,
    seeds: int | None = None,
    scale: str = FULL,
    more: Sequence[str] = (),
    has_all_rows: bool = True,
) -> tuple[Part, list[RunPlan]]:
    """Returns a study with all its runs."""
    check_overrides(study, more)
    trained = cells(name, study)
    called, number = Counter(cell.name for cell in trained).most_common(1)[0]
    if number > 1:
        raise UserError(f"{name}: rows: {number} of them are called {called}")
    pairs = comparisons(name, trained)
    chosen = seeds_of(study, seeds, scale)
    plans = []
    configs = {}
    for cell in trained:
        overrides = overrides_of_cell(cell, study, scale, more)
        of_cell = [plan_run(["resume=auto", *overrides, f"seed={x}"], cell.label) for x in chosen]
        configs[cell.label] = of_cell[0].config
        plans += of_cell
    if study.tested is not None and study.tested not in OUTCOMES:
        metric = study.tested.measure
        without = [label for label, x in configs.items() if metric not in x.recipe.metrics]
        if without:
            reason = f"{without[0]} has no recipe.metrics.{metric}=package.module:factory"
            raise UserError(f"tested={study.tested.name}: {reason}")
    changes = [override for override in more if changes_result(key_of(override))]
    shown = study
    if scale == SMOKE:
        changes = SHORT + study.smoke + changes
    if changes:
        shown = unprinted(shown)
    is_paper = name in PAPERS and has_all_rows
    part = Part(
        name=name,
        study=shown,
        is_whole_of_the_paper=is_paper and not changes and chosen == seeds_of(study, None, FULL),
        cells=[replace(cell, spec=shown.rows[cell.row]) for cell in trained],
        pairs=pairs,
        configs=configs,
        seeds=chosen,
        changes=changes,
    )
    return part, plans


def unprinted(study: Study) -> Study:
    """Returns a study without what is printed of it, which other runs must not stand beside."""
    rows = {name: replace(row, printed={}) for name, row in study.rows.items()}
    return replace(study, rows=rows, notes=[])


def seeds_of(study: Study, seeds: int | None, scale: str) -> list[int]:
    count = seeds or study.seeds
    if seeds is None and scale == SMOKE:
        count = 1
    return list(range(study.first_seed, study.first_seed + count))


def overrides_of_cell(cell: Cell, study: Study, scale: str, more: Sequence[str]) -> list[str]:
    """Returns the overrides of a cell at a scale. The last override for a key counts."""
    overrides = list(cell.overrides)
    if scale == SMOKE:
        overrides += SHORT + study.smoke
        if compose([*overrides, *more]).augmentation.htm is not None:
            overrides += MIXING
    return overrides + list(more)


def check_overrides(study: Study, more: Sequence[str]) -> None:
    """Raises UserError for an override of all rows that sets a key of one of them."""
    for override in more:
        for name, row in study.rows.items():
            for own in row.overrides:
                if overlap(key_of(override), key_of(own)):
                    raise UserError(
                        f"{override}: rows.{name} sets {own}, so it cannot be for all rows"
                    )


def overlap(key: str, other: str) -> bool:
    """Whether setting one key changes what another one has set; a group's option does not."""
    if key == other:
        return True
    groups = {path.name for path in CONF_DIR.iterdir()}
    if key in groups or other in groups:
        return False
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
