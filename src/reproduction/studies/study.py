"""A study is a YAML file of rows to train, of what is printed of them and which are compared.

The paper's tables and sweeps lie in paper/, studies of your own in results/; all have this form.
A row that lists values is a sweep: each of its points is a cell, as is any other row.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BeforeValidator, Field

from reproduction.config import Count, FolderName, Fraction, Whole, schema, validated
from reproduction.identity import RowId, run_hash
from reproduction.points import Point, compose, expand, point
from reproduction.system import UserError
from reproduction.words import last_part, read_yaml

PAPER_FOLDER = Path(__file__).parent / "paper"
TABLES = ("table1", "table2", "table3", "table4", "table5")
PAPERS = (*TABLES, "sweep-tau", "sweep-rho", "sweep-kappa")
OWN_KEYS = ("seed", "devices", "name", "output_root", "resume")  # of a run, not of a study
FULL: Final = "full"
SMOKE: Final = "smoke"
SCALES = (FULL, SMOKE)
# Four batches of eight images, tested on forty. An untrained model finds every sample difficult and
# attends evenly, so HTM would mix nothing.
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
MIXING = ["augmentation.htm.tau=inf", "augmentation.htm.rho=0"]
Tested = Literal[
    "top1 on test",
    "loss on test",
    "top5 on test",
    "top1 on validation",
    "loss on validation",
    "top5 on validation",
]
FORMER = {"top1_last": "top1 on test", "loss_last": "loss on test"}  # names of what is tested
Printed = dict[Literal["top1", "top5"], float]  # percent


def _long_form(row: Any) -> Any:
    if isinstance(row, list):
        return {"overrides": row}
    return row


def _present_name(tested: Any) -> Any:
    return FORMER.get(tested, tested)


@schema
class Row:
    """What to train: `overrides` of train.py, of which some may list values, which makes a sweep.

    `row` and `column` are shown, with what is `printed`. `against` names the row it is compared
    with; by its `role` without a test, or as the one comparison that the study was made for, which
    is not corrected for the others.
    """

    overrides: list[str]
    row: str = ""
    column: str = ""
    printed: Printed = Field(default_factory=dict)
    against: str | None = None
    role: Literal["", "untested", "primary"] = ""


@schema
class Size:
    """A model of which the paper prints the `parameters`, in millions, if it does."""

    overrides: list[str]
    classes: int
    parameters: float | None = None


@schema
class Study:
    """The content of the file. `overrides` are of all rows; a row may be a list of overrides.

    `seeds` is their number, from `first_seed` on; runs of others do not count. `tested` is the
    outcome that rows are tested by; without it, their accuracy on the validation split, if there is
    one, else on the test set. With `looks`, number of seeds -> level of significance, the table has
    the first so many seeds, once every run of them is finished, and no others. `smoke` has more
    overrides for runs of this scale. `quoted` has results of others by row and column, from
    `source`. `figures`, title -> ROW/PICTURE, are what the runs of a row have drawn. `latencies`
    are printed milliseconds of HTM's detectors.
    """

    title: str
    about: str = ""
    pilot: str = ""
    overrides: list[str] = Field(default_factory=list)
    rows: dict[FolderName, Annotated[Row, BeforeValidator(_long_form)]] = Field(min_length=1)
    seeds: Count = 3
    first_seed: Whole = 0
    looks: dict[Count, Fraction] = Field(default_factory=dict)
    tested: Annotated[Tested | None, BeforeValidator(_present_name)] = None
    smoke: list[str] = Field(default_factory=list)
    source: str = ""
    quoted: dict[str, dict[str, Printed]] = Field(default_factory=dict)
    sizes: dict[str, Size] = Field(default_factory=dict)
    figures: dict[str, str] = Field(default_factory=dict)
    latencies: dict[str, float] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)

    def __post_init__(self) -> None:
        for name, row in self.rows.items():
            for word in self.overrides + row.overrides:
                key = word.lstrip("+~").partition("=")[0]
                if key in OWN_KEYS:
                    raise ValueError(f"rows.{name}: {word}: a study must not set {key}")
            others = [other for other in self.rows if other != name]
            if row.against is not None and row.against not in others:
                allowed = ", ".join(others) or "left out, as there is no other row"
                raise ValueError(f"rows.{name}.against={row.against}: must be one of {allowed}")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is trained of a study: a row, or a point of a row that is a sweep."""

    id: RowId
    row: Row
    words: list[str]
    label: str  # names it in lists and folders

    @property
    def text(self) -> str:
        """What a table shows of it."""
        if self.row.row and not self.id.swept:
            return self.row.row
        return self.label.partition("/")[2]


def cells(name: str, study: Study) -> list[Cell]:
    """Returns what is trained of a study, which was typed by this name."""
    every = {row: _points(study, row) for row in study.rows}
    sweeps = [row for row, points in every.items() if len(points) > 1]
    each = []
    for row, points in every.items():
        for values, words in points.items():
            text = row
            if values:
                text = ",".join(f"{last_part(key)}={value}" for key, value in values)
            if values and len(sweeps) > 1:
                text = f"{row},{text}"
            each.append(
                Cell(
                    id=RowId(name, row, values, study.rows[row].column),
                    row=study.rows[row],
                    words=words,
                    label=f"{Path(name).stem}/{text}",
                )
            )
    return each


def _points(study: Study, row: str) -> dict[tuple[tuple[str, str], ...], list[str]]:
    """Returns the words of each point of a row, by the keys and values that differ."""
    every = expand(study.overrides + study.rows[row].overrides)
    swept = [place for place, word in enumerate(every[0]) if _varies(every, place, word)]
    found = {}
    for words in every:
        parts = [words[place].partition("=") for place in swept]
        point = tuple((key, value) for key, _, value in parts)
        found[point] = words
    return found


def _varies(every: Sequence[Sequence[str]], place: int, word: str) -> bool:
    return any(words[place] != word for words in every)


def comparisons(each: Sequence[Cell]) -> dict[RowId, RowId]:
    """Returns which cell each one is compared with; two sweeps are compared point by point.

    Raises ValueError for a row of which nothing is compared as the study says.
    """
    by_row = defaultdict[str, list[Cell]](list)
    for cell in each:
        by_row[cell.id.row].append(cell)
    pairs = {}
    for own in by_row.values():
        against = own[0].row.against
        bases = by_row.get(against or "", [])
        for cell in own:
            for base in bases:
                if base.id.swept in ((), cell.id.swept):
                    pairs[cell.id] = base.id
        if bases and not any(cell.id in pairs for cell in own):
            rule = "is a sweep, and a sweep is compared with one over the same values"
            raise ValueError(f"rows.{own[0].id.row}.against={against}: {rule}")
    return pairs


def studies(name: str) -> dict[str, Study]:
    """Returns the studies of a name: `table1`, `table1/ROW`, `sweep-tau`, `all`, a .yaml file."""
    if name.endswith(".yaml"):
        return {name: read(Path(name))}
    papers = {paper: read(PAPER_FOLDER / f"{paper}.yaml") for paper in PAPERS}
    if name == "all":
        return papers
    table, _, row = name.partition("/")
    if table not in papers:
        allowed = ", ".join(PAPERS)
        raise UserError(f"study={name}: must be one of {allowed}, all, FILE.yaml")
    study = papers[table]
    if row and row not in study.rows:
        raise UserError(f"study={name}: must be one of {', '.join(study.rows)}")
    if row:
        study = replace(study, rows={row: replace(study.rows[row], against=None)})
    return {table: study}


def read(path: Path) -> Study:
    """Reads a study; UserError names the file, the key and what is wrong with it."""
    try:
        study = validated(Study, read_yaml(path))
        comparisons(cells(str(path), study))
        return study
    except (UserError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: {error}") from error


def plan(
    chosen: Mapping[str, Study], seeds: int | None, scale: str, more: Sequence[str]
) -> list[Point]:
    """Returns all runs, seed by seed; rows of the same configuration share one.

    Of the words of study, row, scale and `more` the last counts.
    """
    runs: dict[str, Point] = {}
    rows = defaultdict[str, list[RowId]](list)
    for name, study in chosen.items():
        number = seeds or study.seeds
        if seeds is None and scale == SMOKE:
            number = 1
        for cell in cells(name, study):
            words = words_of(cell, study, scale) + list(more)
            for seed in range(study.first_seed, study.first_seed + number):
                run = point([*words, f"seed={seed}", "resume=auto"], cell.label)
                runs.setdefault(run_hash(run.config), run)
                rows[run_hash(run.config)].append(cell.id)
    shared = [replace(run, rows=tuple(rows[identity])) for identity, run in runs.items()]
    return sorted(shared, key=lambda run: run.config.seed)


def words_of(cell: Cell, study: Study, scale: str) -> list[str]:
    """Returns the words of a cell at a scale."""
    if scale == FULL:
        return cell.words
    words = cell.words + SHORT + study.smoke
    if compose(cell.words).augmentation.htm is not None:
        words += MIXING
    return words
