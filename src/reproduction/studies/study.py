"""A study is a YAML file: the rows to train, what is printed of them and which rows are compared.

The paper's tables and sweeps lie in paper/, studies of your own in results/; all have this form.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from reproduction.config import FORBID, Count, FolderName, Fraction, Whole
from reproduction.system.errors import UserError, first_line
from reproduction.system.reading import parse_yaml

PAPER_FOLDER = Path(__file__).parent / "paper"
TABLES = tuple(f"table{number}" for number in range(1, 6))
SWEEPS = ("sweep-tau", "sweep-rho", "sweep-kappa")
OWN_KEYS = ("seed", "devices", "name", "output_root", "resume")  # set for each run of a plan
FULL, SMOKE = "full", "smoke"
BASELINE = "baseline"  # of a sweep, shown beside its values
T = TypeVar("T")


@checked(config=FORBID, frozen=True, kw_only=True)
class Row:
    """What to train: an `experiment`, `overrides` of train.py or both.

    `value` has the overrides that count more than those of a scale, as a sweep's does. `row` and
    `column` are shown, `printed` holds top1 and top5 in percent, `against` names the row
    that it is tested against: `row` or `study/row`. By its `role` the difference is shown without a
    test, or it is the one that the study was made for, which is not corrected for the others.
    """

    experiment: str | None = None
    overrides: list[str] = Field(default_factory=list)
    value: list[str] = Field(default_factory=list)
    row: str = ""
    column: str = ""
    printed: dict[Literal["top1", "top5"], float] = Field(default_factory=dict)
    against: str | None = None
    role: Literal["", "untested", "primary"] = ""

    @property
    def command(self) -> list[str]:
        """The overrides with the experiment."""
        return [*([f"experiment={self.experiment}"] if self.experiment else []), *self.overrides]

    @property
    def is_open(self) -> bool:
        """Whether a value is `???`: a pilot chooses it before the first run of the study."""
        return any(word.endswith("=???") for word in self.overrides)


@checked(config=FORBID, frozen=True, kw_only=True)
class Sweep:
    """Rows for the `values` of a `key`; `own` (study/row) has the paper's value and baseline."""

    key: str
    values: list[str | int | float]
    own: str
    values_at: dict[str, list[str | int | float]] = Field(default_factory=dict)  # by scale

    @property
    def word(self) -> str:
        return self.key.rpartition(".")[2]


@checked(config=FORBID, frozen=True, kw_only=True)
class Size:
    """A printed size and the model of the row here, with its stored counts.

    `parameters` in millions and `macs` in billions are printed; `counted` are our parameters, MACs
    of one image, and MACs without the matmuls of attention.
    """

    model: str
    classes: int
    counted: tuple[int, int, int]
    stack: list[str] = Field(default_factory=list)
    overrides: list[str] = Field(default_factory=list)
    parameters: int | float | None = None
    macs: int | float | None = None

    @property
    def command(self) -> list[str]:
        return [f"model={self.model}", f"augmentation=[{','.join(self.stack)}]", *self.overrides]


@checked(config=FORBID, frozen=True, kw_only=True)
class Figure:
    """A picture that each run of the row `of` has drawn."""

    of: str
    title: str
    shows: Literal["saliency", "mixed_pairs", "mixed_samples"]
    seeds: Count | None = None


def _long_form(row: Any) -> Any:
    return {"overrides": row} if isinstance(row, list) else row


@checked(config=FORBID, frozen=True, kw_only=True)
class Study:
    """The content of the file. `overrides` are of all rows; a row may be a list of overrides.

    `seeds` is their number, from `first_seed` on; runs of others do not count. `tested` is the
    outcome that rows are tested by. With `looks`, number of seeds -> level of significance, the
    table has the first so many seeds of which every run is finished, and no others. `scales` has
    the overrides of a study of your own at other scales than full. `quoted` has results of others
    by row and column, from `source`.
    """

    title: str
    about: str = ""
    pilot: str = ""
    overrides: list[str] = Field(default_factory=list)
    rows: dict[FolderName, Annotated[Row, BeforeValidator(_long_form)]] = Field(
        default_factory=dict
    )
    sweep: Sweep | None = None
    seeds: Count | None = None
    first_seed: Whole = 0
    looks: dict[Count, Fraction] = Field(default_factory=dict)
    tested: Literal["top1_last", "loss_last"] = "top1_last"
    scales: dict[Literal["smoke"], list[str]] = Field(default_factory=dict)
    source: str = ""
    quoted: dict[str, dict[str, dict[Literal["top1", "top5"], float]]] = Field(default_factory=dict)
    sizes: dict[str, Size] = Field(default_factory=dict)
    figures: dict[str, Figure] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)

    def has(self, seed: int) -> bool:
        """Whether runs with this seed belong to the study."""
        return self.seeds is None or 0 <= seed - self.first_seed < self.seeds


@checked(config=FORBID, frozen=True, kw_only=True)
class Scale:
    """How the paper's rows are trained at a scale, see paper/scales.yaml."""

    about: str
    seeds: int = 3
    apart: bool = True
    dataset: str | None = None
    only: list[str] | None = None  # columns
    overrides: list[str] = Field(default_factory=list)
    columns: dict[str, list[str]] = Field(default_factory=dict)
    stacks: dict[str, list[str]] = Field(default_factory=dict)

    def of_stack(self, stack: list[str]) -> list[str]:
        """Returns the entries of `stacks` that apply to these augmentations."""
        chosen = (more for key, more in self.stacks.items() if {*key.split("+")} <= {*stack})
        return [*chain.from_iterable(chosen)]


@cache
def scales() -> Mapping[str, Scale]:
    return _read(PAPER_FOLDER / "scales.yaml", dict[str, Scale])


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a command.

    `dataset`: an option that replaces the data sets of the rows. `data`: its folder; without
    `dataset`, the folder of CIFAR, with ImageNet in `imagenet`. `outputs`: the folder of all runs;
    scales other than `full` have a folder of their own in it.
    """

    scale: str = FULL
    dataset: str | None = None
    data: str | None = None
    devices: int = 1
    outputs: str = "outputs"

    def __post_init__(self) -> None:
        if self.scale not in scales():
            raise UserError(f"scale={self.scale}: must be one of {', '.join(scales())}")
        if self.dataset == "image_folder" and self.data is None and not self.uses_stand_ins:
            raise UserError("dataset=image_folder: name the folder of images as well, with data")
        own = self.chosen.dataset
        if own is not None and (self.dataset or self.data) is not None:
            raise UserError(f"scale={self.scale}: always uses {own}, leave dataset and data out")

    @property
    def chosen(self) -> Scale:
        return scales()[self.scale]

    @property
    def root(self) -> Path:
        """The folder of the runs of this scale."""
        return Path(self.outputs) if self.scale == FULL else Path(self.outputs, self.scale)

    @property
    def uses_stand_ins(self) -> bool:
        """Whether to train on digits instead: at smoke scale, unless `data` is set."""
        return self.scale == SMOKE and self.data is None

    def dataset_root(self, name: str) -> str | None:
        """Returns the folder of a data set, None for the default of its config file."""
        if self.uses_stand_ins:
            return None if name == "digits" else str(self.root / "data" / name)
        if self.data is None or self.dataset is not None or name != "imagenet1k":
            return self.data
        return str(Path(self.data, "imagenet"))


@cache
def papers_studies() -> Mapping[str, Study]:
    """Returns the five tables and three sweeps by name."""
    return {name: _read(PAPER_FOLDER / f"{name}.yaml", Study) for name in (*TABLES, *SWEEPS)}


def papers_row(label: str) -> Row:
    """Returns a row of the paper's tables by its label."""
    table, _, name = label.partition("/")
    return papers_studies()[table].rows[name]


@cache
def papers_figures() -> Mapping[str, tuple[str, Figure]]:
    """Returns each figure with the study that it belongs to."""
    studies = papers_studies().items()
    return {key: (name, figure) for name, study in studies for key, figure in study.figures.items()}


def read_study(path: Path) -> Study:
    """Reads a study of your own; UserError names the file, the key and what is wrong with it."""
    study = _read(path, Study)
    rows = study.rows.items()
    own_words = [x.overrides + x.value for _, x in rows]
    for override in chain(study.overrides, *study.scales.values(), *own_words):
        if (key := override.lstrip("+~").partition("=")[0]) in OWN_KEYS:
            raise UserError(f"{path}: {override}: a study must not set {key}")
    papers = [f"{table}/{name}" for table in TABLES for name in papers_studies()[table].rows]
    bases = [name for name, row in rows if not row.is_open]
    for name, row in rows:
        if row.against not in (None, *bases, *papers):
            allowed = f"{', '.join(bases)}, or a row of the paper such as table4/full"
            raise UserError(f"{path}: rows.{name}.against={row.against}: must be one of {allowed}")
    if study.looks and max(study.looks) != study.seeds:
        raise UserError(f"{path}: looks: the last must be at seeds={study.seeds}")
    if study.sweep is not None or not study.rows:
        raise UserError(f"{path}: rows: must name one row at least; sweeps are the paper's")
    return study


def _read(path: Path, kind: type[T]) -> T:
    try:
        return TypeAdapter(kind).validate_python(parse_yaml(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "must be a mapping of settings"
        reason = first["msg"]
        if first["type"] == "unexpected_keyword_argument":
            *place, last = map(str, first["loc"])
            kinds = {"rows": Row, "sizes": Size, "figures": Figure, "sweep": Sweep}
            known = [x.name for x in fields(kinds.get("".join(place[:1]), Study))]
            near = get_close_matches(last, known, n=1)
            reason = f"unknown key, {'perhaps' if near else 'known are'} {', '.join(near or known)}"
        raise UserError(f"{path}: {key}: {reason}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable: {first_line(error)}") from error


def rows_at_scale(study: Study, scale: str = FULL) -> dict[str, Row]:
    """Returns the rows with the overrides of the study; a sweep begins with its baseline."""
    if study.sweep is None:
        return {
            name: replace(row, row=row.row or name, overrides=[*study.overrides, *row.overrides])
            for name, row in study.rows.items()
        }
    sweep = study.sweep
    own = papers_row(sweep.own)
    base = str(own.against)
    baseline = papers_row(base if "/" in base else f"{sweep.own.partition('/')[0]}/{base}")
    rows = {BASELINE: replace(baseline, row=BASELINE, against=sweep.own)}
    for value in sweep.values_at.get(scale, sweep.values):
        text = f"{value:g}" if isinstance(value, float) else str(value)
        changed = replace(own, row=text, value=[f"{sweep.key}={text}"], printed={})
        rows[f"{sweep.word}={text}"] = replace(changed, against=sweep.own)
    return rows
