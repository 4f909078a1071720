"""A study is a YAML file of rows to train, of what is printed of them and which are compared.

The paper's tables and sweeps lie in paper/, studies of your own in results/; all have this form.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from reproduction.config import FORBID, Count, FolderName, Fraction, Whole, line_of
from reproduction.runs import key
from reproduction.start import Point, compose, expand, point
from reproduction.system import UserError
from reproduction.words import read_yaml, readable

PAPER_FOLDER = Path(__file__).parent / "paper"
TABLES = ("table1", "table2", "table3", "table4", "table5")
PAPERS = (*TABLES, "sweep-tau", "sweep-rho", "sweep-kappa")
OWN_KEYS = ("seed", "devices", "name", "output_root", "resume")  # of a run, not of a study
FULL: Final = "full"
SMOKE: Final = "smoke"
SCALES = (FULL, SMOKE)
# Four batches of eight images. An untrained model finds every sample difficult and attends evenly.
SHORT = (
    *("recipe.epochs=1", "recipe.batch_size=8", "recipe.precision=float32", "recipe.log_every=1"),
    *("recipe.max_steps=4", "recipe.warmup_epochs=0", "dataset=digits", "dataset.root=null"),
    *("dataset.workers=0", "output_root=outputs/smoke"),
)
MIXING = ("augmentation.htm.tau=inf", "augmentation.htm.rho=0")
Printed = dict[Literal["top1", "top5"], float]  # percent


def _long_form(row: Any) -> Any:
    return {"overrides": row} if isinstance(row, list) else row


@checked(config=FORBID, frozen=True, kw_only=True)
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


@checked(config=FORBID, frozen=True, kw_only=True)
class Size:
    """A model of which the paper prints the `parameters`, in millions, if it does."""

    overrides: list[str]
    classes: int
    parameters: float | None = None


@checked(config=FORBID, frozen=True, kw_only=True)
class Study:
    """The content of the file. `overrides` are of all rows; a row may be a list of overrides.

    `seeds` is their number, from `first_seed` on; runs of others do not count. `tested` is the
    outcome that rows are tested by. With `looks`, number of seeds -> level of significance, the
    table has the first so many seeds of which every run is finished, and no others. `smoke` has
    more overrides for runs of this scale. `quoted` has results of others by row and column, from
    `source`. `figures`, title -> ROW/PICTURE, are what the runs of a row have drawn.
    """

    title: str
    about: str = ""
    pilot: str = ""
    overrides: list[str] = Field(default_factory=list)
    rows: dict[FolderName, Annotated[Row, BeforeValidator(_long_form)]] = Field(min_length=1)
    seeds: Count = 3
    first_seed: Whole = 0
    looks: dict[Count, Fraction] = Field(default_factory=dict)
    tested: Literal["top1_last", "loss_last"] = "top1_last"
    smoke: list[str] = Field(default_factory=list)
    source: str = ""
    quoted: dict[str, dict[str, Printed]] = Field(default_factory=dict)
    sizes: dict[str, Size] = Field(default_factory=dict)
    figures: dict[str, str] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)

    def __post_init__(self) -> None:
        for name, row in self.rows.items():
            for word in (*self.overrides, *row.overrides):
                if (key := word.lstrip("+~").partition("=")[0]) in OWN_KEYS:
                    raise ValueError(f"rows.{name}: {word}: a study must not set {key}")
            if row.against not in (None, *self.rows):
                allowed = ", ".join(self.rows)
                raise ValueError(f"rows.{name}.against={row.against}: must be one of {allowed}")

    def cells(self) -> dict[str, tuple[Row, list[str]]]:
        """Returns what is trained: each row by its name, each point of a sweep by its values."""
        cells = {}
        for name, row in self.rows.items():
            given = [readable(word) for word in (*self.overrides, *row.overrides)]
            for words in expand(given):
                swept = [x.partition("=") for x in words if x not in given]
                values = [f"{key.rpartition('.')[2]}={value}" for key, _, value in swept]
                cells[",".join(values) or name] = row, words
        return cells


def studies(name: str) -> dict[str, Study]:
    """Returns the studies of a name: `table1`, `table1/ROW`, `sweep-tau`, `all`, a .yaml file."""
    if name.endswith(".yaml"):
        return {Path(name).stem: read(Path(name))}
    papers = {paper: read(PAPER_FOLDER / f"{paper}.yaml") for paper in PAPERS}
    if name == "all":
        return papers
    table, _, row = name.partition("/")
    if table not in papers or row not in ("", *papers[table].rows):
        allowed = papers[table].rows if table in papers else (*PAPERS, "all", "FILE.yaml")
        raise UserError(f"study={name}: must be one of {', '.join(allowed)}")
    study = papers[table]
    if row:
        study = replace(study, rows={row: replace(study.rows[row], against=None)})
    return {table: study}


def read(path: Path) -> Study:
    """Reads a study; UserError names the file, the key and what is wrong with it."""
    try:
        return TypeAdapter(Study).validate_python(read_yaml(path))
    except (ValueError, yaml.YAMLError) as error:
        wrong = [*map(line_of, error.errors())] if isinstance(error, ValidationError) else []
        raise UserError(f"{path}: {'; '.join(wrong) or error}") from error


def points(
    name: str, study: Study, seed: int, scale: str = FULL, more: Sequence[str] = ()
) -> Iterator[Point]:
    """Yields the runs of one seed; of the words of study, row, scale and `more` the last counts."""
    for cell, (_, words) in study.cells().items():
        each = [*words, *more]
        if scale == SMOKE:
            mixing = MIXING if compose(words).augmentation.htm else ()
            each = [*words, *SHORT, *study.smoke, *mixing, *more]
        yield point([*each, f"seed={seed}", "resume=auto"], f"{name}/{cell}")


def plan(
    chosen: Mapping[str, Study], seeds: int | None, scale: str, more: Sequence[str]
) -> list[Point]:
    """Returns all runs, seed by seed; rows of the same configuration share one."""
    runs: dict[str, Point] = {}
    for name, study in chosen.items():
        number = seeds or (1 if scale == SMOKE else study.seeds)
        for seed in range(study.first_seed, study.first_seed + number):
            for each in points(name, study, seed, scale, more):
                runs.setdefault(key(each.config), each)
    return sorted(runs.values(), key=lambda each: each.config.seed)
