"""A study is a YAML file: rows to train, the paper's values of them, and which are compared.

The paper's tables and sweeps lie in paper/, studies of your own in results/; all have this form.
A row is a cell, or a sweep if it lists values: then each combination of them is a cell.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field

from reproduction.config import Count, FolderName, Fraction, Whole, schema, validated
from reproduction.identity import RowId, run_hash
from reproduction.points import Point, compose, expand, point
from reproduction.system import UserError
from reproduction.words import key_of, last_part, read_yaml

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
FULL = "full"
SMOKE = "smoke"
SCALES = (FULL, SMOKE)
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
Tested = Literal[
    "top1 on test",
    "loss on test",
    "top5 on test",
    "top1 on validation",
    "loss on validation",
    "top5 on validation",
]
FORMER_NAMES = {"top1_last": "top1 on test", "loss_last": "loss on test"}
Printed = dict[Literal["top1", "top5"], float]  # percent, on the test set


def _mapping_of(row: Any) -> Any:
    """Returns a row as a mapping; it may be written as a list of overrides alone."""
    if isinstance(row, list):
        return {"overrides": row}
    return row


def _present_name(tested: Any) -> Any:
    return FORMER_NAMES.get(tested, tested)


@schema
class Row:
    """What a study says of a row."""

    overrides: list[str]  # of train.py, some of which may list values
    row: str = ""  # its text in a table, unless it is a sweep
    column: str = ""  # the title of the part of the table that has it
    printed: Printed = Field(default_factory=dict)
    against: str | None = None  # the name of the row that it is compared with
    # untested: the difference has no p; primary: Holm's correction leaves its p as it is
    role: Literal["", "untested", "primary"] = ""


@schema
class PrintedModel:
    """A model whose parameters are counted beside those that the paper prints."""

    overrides: list[str]
    classes: int
    parameters: float | None = None  # in millions; the paper does not print all


@schema
class Study:
    """The content of the file."""

    title: str
    about: str = ""
    pilot: str = ""
    overrides: list[str] = Field(default_factory=list)  # of all rows
    rows: dict[FolderName, Annotated[Row, BeforeValidator(_mapping_of)]] = Field(min_length=1)
    seeds: Count = 3  # how many
    # Only runs with the seeds that a command asks for count: from this one on, `seeds` of them
    # unless it says how many.
    first_seed: Whole = 0
    # Interim looks, {number of seeds: level of significance}: the table shows the largest one whose
    # runs are all finished, and no seed beyond it.
    looks: dict[Count, Fraction] = Field(default_factory=dict)
    # The outcome by which rows are tested; without it the accuracy, as `judged_by` chooses.
    tested: Annotated[Tested | None, BeforeValidator(_present_name)] = None
    smoke: list[str] = Field(default_factory=list)  # more overrides, at this scale
    source: str = ""  # of what is quoted
    quoted: dict[str, dict[str, Printed]] = Field(default_factory=dict)  # by row and column
    sizes: dict[str, PrintedModel] = Field(default_factory=dict)
    figures: dict[str, str] = Field(default_factory=dict)  # title -> ROW/PICTURE of its first run
    latencies: dict[str, float] = Field(default_factory=dict)  # printed ms of HTM's detectors
    notes: list[str] = Field(default_factory=list)

    def __post_init__(self) -> None:
        for name, row in self.rows.items():
            for word in self.overrides + row.overrides:
                if key_of(word) in OWN_KEYS:
                    raise ValueError(f"rows.{name}: {word}: a study must not set {key_of(word)}")
            others = [other for other in self.rows if other != name]
            if row.against is not None and row.against not in others:
                allowed = ", ".join(others) or "left out, as there is no other row"
                raise ValueError(f"rows.{name}.against={row.against}: must be one of {allowed}")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is trained of a study: a row, or one combination of the values of a sweep."""

    id: RowId
    settings: Row
    words: list[str]
    label: str  # names it in lists and folders

    @property
    def text(self) -> str:
        """What a table shows of it."""
        if self.settings.row and not self.id.swept:  # a sweep is shown by its values
            return self.settings.row
        return self.label.partition("/")[2]


def cells(name: str, study: Study) -> list[Cell]:
    """Returns what is trained of a study, which was typed by this name."""
    swept = {row: _swept(study, row) for row in study.rows}
    num_sweeps = sum(len(words_by_values) > 1 for words_by_values in swept.values())
    each = []
    for row, words_by_values in swept.items():
        for values, words in words_by_values.items():
            parts = [f"{last_part(key)}={value}" for key, value in values]
            if not values or num_sweeps > 1:
                parts.insert(0, row)
            each.append(
                Cell(
                    id=RowId(name, row, values, study.rows[row].column),
                    settings=study.rows[row],
                    words=words,
                    label=f"{Path(name).stem}/{','.join(parts)}",
                )
            )
    return each


def _swept(study: Study, row: str) -> dict[tuple[tuple[str, str], ...], list[str]]:
    """Returns the words of each combination of a row, by the keys and values that differ."""
    every = expand(study.overrides + study.rows[row].overrides)
    differ = [len({*words}) > 1 for words in zip(*every, strict=True)]
    found = {}
    for words in every:
        parts = [word.partition("=") for word in compress(words, differ)]
        found[tuple((key, value) for key, _, value in parts)] = words
    return found


def comparisons(each: Sequence[Cell]) -> dict[RowId, RowId]:
    """Returns which cell each one is compared with; of two sweeps, those of the same values.

    Raises ValueError for a row of which nothing is compared as the study says.
    """
    pairs = {}
    for cell in each:
        for base in each:
            is_named = base.id.row == cell.settings.against
            if is_named and base.id.swept in ((), cell.id.swept):
                pairs[cell.id] = base.id
    rows = {cell.id.row for cell in each}
    compared = {cell_id.row for cell_id in pairs}
    for cell in each:
        row, against = cell.id.row, cell.settings.against
        if against in rows and row not in compared:
            rule = "is a sweep, and a sweep is compared with one over the same values"
            raise ValueError(f"rows.{row}.against={against}: {rule}")
    return pairs


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
    if row:  # alone: `against` would name a row that is not there, which Study refuses
        study = replace(study, rows={row: replace(study.rows[row], against=None)})
    return {table: study}


def read(path: Path) -> Study:
    """Reads a study; UserError names the file, the key and what is wrong with it."""
    try:
        study = validated(Study, read_yaml(path))
        comparisons(cells(str(path), study))  # refuses what cannot be compared
        return study
    except (UserError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: {error}") from error


def plan(
    chosen: Mapping[str, Study], seeds: int | None, scale: str, more: Sequence[str]
) -> list[Point]:
    """Returns all runs, seed by seed; rows of the same configuration share one."""
    points: dict[str, Point] = {}
    rows = defaultdict[str, list[RowId]](list)
    for name, study in chosen.items():
        default = study.seeds
        if scale == SMOKE:
            default = 1
        for cell in cells(name, study):
            words = words_of(cell, study, scale, more)
            for seed in range(study.first_seed, study.first_seed + (seeds or default)):
                planned = point([*words, f"seed={seed}", "resume=auto"], cell.label)
                own_hash = run_hash(planned.config)
                points.setdefault(own_hash, planned)
                rows[own_hash].append(cell.id)
    shared = [replace(points[own_hash], rows=tuple(rows[own_hash])) for own_hash in points]
    return sorted(shared, key=lambda planned: planned.config.seed)


def words_of(cell: Cell, study: Study, scale: str, more: Sequence[str]) -> list[str]:
    """Returns the words of a cell at a scale. The last word for a key counts."""
    words = [*cell.words]
    if scale == SMOKE:
        words += [*SHORT, *study.smoke]
        if compose([*words, *more]).augmentation.htm is not None:
            words += MIXING
    return [*words, *more]
