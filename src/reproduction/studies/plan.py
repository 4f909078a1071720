"""Which runs the paper's tables and sweeps need, and what is known of them.

Imports no torch. A study is `table1` to `table5`, `figure3`, `figure4`, `sweep-tau`, `sweep-rho`,
`sweep-kappa` or `all`.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from reproduction.config import STACK, Config
from reproduction.reporting.cells import (
    CIFAR_10,
    CIFAR_100,
    FULL,
    IMAGENET,
    SCALES,
    Cell,
    Scale,
    read_cells,
)
from reproduction.runs.compose import compose
from reproduction.runs.folder import RunFolder, default_name, find_runs, run_hash
from reproduction.runs.parse import parse
from reproduction.system.errors import UserError

DATASET_OPTIONS = ("cifar10", "cifar100", "imagenet1k", "image_folder", "digits")
DATASETS = {CIFAR_10: "cifar10", CIFAR_100: "cifar100", IMAGENET: "imagenet1k"}

# Sweeps: the experiment that each goes out from, the key, and the values beside the paper's own.
SWEEPS = {
    "sweep-tau": ("table1/cifar100_htm", "augmentation.htm.tau", "0 0.5 1 1.5 2 3 4 inf"),
    "sweep-rho": (
        "table1/cifar100_htm",
        "augmentation.htm.rho",
        "0 0.001 0.003 0.005 0.01 0.02 inf",
    ),
    "sweep-kappa": ("table1/cifar100_vtm", "augmentation.vtm.kappa", "1 3 5 10 20 40 80 160 256"),
}
# Figures: the experiment whose runs draw each.
FIGURES = {"figure3": "table1/cifar100_htm", "figure4": "table1/cifar100_htm"}
STUDIES = (*(f"table{number}" for number in range(1, 6)), *FIGURES, *SWEEPS, "all")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a study is run with.

    `dataset`: an option of the group in place of the cells' own data sets. `data`: its folder;
    without `dataset` the folder that holds CIFAR, and ImageNet as `imagenet`. `outputs`: the folder
    of all runs; those of other scales than `full` lie in a folder of their scale in it.
    """

    scale: str = FULL
    dataset: str | None = None
    data: str | None = None
    devices: int = 1
    outputs: str = "outputs"

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise UserError(f"scale={self.scale}: must be one of {', '.join(SCALES)}")
        if self.dataset == "image_folder" and self.data is None and not self.uses_stand_ins:
            raise UserError("dataset=image_folder: name the folder of images as well, with data")
        own = self.chosen.dataset
        if own is not None and (self.dataset or self.data) is not None:
            raise UserError(f"scale={self.scale}: has {own} alone, leave dataset and data out")

    @property
    def chosen(self) -> Scale:
        """The scale."""
        return SCALES[self.scale]

    @property
    def root(self) -> Path:
        """The folder of these runs."""
        return Path(self.outputs) if self.scale == FULL else Path(self.outputs, self.scale)

    @property
    def uses_stand_ins(self) -> bool:
        """Whether images are made on the spot: at smoke scale, unless a folder is named."""
        return self.scale == "smoke" and self.data is None

    def dataset_root(self, name: str) -> str | None:
        """Where the images of a data set are looked for; None: where its own file says."""
        if self.uses_stand_ins:
            return None if name == "digits" else str(self.root / "data" / name)
        if self.data is None or self.dataset is not None or name != "imagenet1k":
            return self.data
        return str(Path(self.data, "imagenet"))


@dataclass(frozen=True)
class Point:
    """One cell, or one value of a sweep; `label` names it to people."""

    label: str
    cell: Cell
    change: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run with its seed, its folder, and everything that it serves.

    `overrides` is the command line of train.py that trains it.
    """

    config: Config
    overrides: tuple[str, ...]
    labels: tuple[str, ...]

    @property
    def name(self) -> str:
        assert self.config.name is not None
        return self.config.name

    @property
    def folder(self) -> RunFolder:
        return RunFolder.of(self.config)

    def is_done(self) -> bool:
        """Whether nothing is left to do, the report included."""
        return self.folder.is_finished() and self.folder.report_path.exists()


def cells_of(scale: str) -> list[Cell]:
    """The cells that a scale trains, in the paper's order."""
    return [cell for cell in read_cells() if cell.column in SCALES[scale].columns]


def point_configs(study: str, settings: Settings) -> dict[str, Config]:
    """The configuration of each cell, by its experiment, and value of a sweep, as `tau=2`.

    With seed 0, and without a name, which is free: `find_runs(config.output_root)` has the folder
    by `run_hash(config)`. Images may be missing. Raises UserError for settings that do not fit
    together.
    """
    return {point.label: _config(point, settings) for point in _points(study, settings)}


def studies_of(scale: str) -> list[str]:
    """The tables and sweeps that a scale has cells of."""
    settings = Settings(scale=scale)
    own = [study for study in STUDIES if study not in ("all", *FIGURES)]
    return [study for study in own if any(_points(study, settings))]


def plan(study: str, settings: Settings, seeds: int) -> list[PlannedRun]:
    """The runs of a study, seed by seed: points of one configuration share one run.

    A run that exists keeps its name; a new one is named after the first cell in the paper that it
    serves. Raises UserError for settings that do not fit together.
    """
    points = list(_points(study, settings))
    if not points:
        raise UserError(f"study={study}: has no cells at {settings.scale} scale")
    firsts: dict[str, str] = {}
    for cell in cells_of(settings.scale):
        if not study.startswith("table") or cell.table <= int(study[-1]):
            key = run_hash(_config(Point(cell.experiment, cell), settings))
            firsts.setdefault(key, cell.experiment)
    existing = find_runs(settings.root)
    grouped: dict[str, list[Point]] = {}
    for point in points:
        grouped.setdefault(run_hash(_config(point, settings)), []).append(point)
    return [
        planned_run(
            _config(group[0], settings),
            _overrides(group[0], settings),
            seed,
            firsts.get(key, group[0].cell.experiment),
            existing,
            tuple(point.label for point in group),
        )
        for seed in range(seeds)
        for key, group in grouped.items()
    ]


def planned_run(
    config: Config,
    overrides: Sequence[str],
    seed: int,
    experiment: str,
    existing: Mapping[str, RunFolder],
    labels: tuple[str, ...],
) -> PlannedRun:
    """A configuration with its seed and name: that of the folder which exists, or a new one."""
    config = dataclasses.replace(config, seed=seed)
    folder = existing.get(run_hash(config))
    name = default_name(config, experiment) if folder is None else folder.path.name
    own = (f"seed={seed}", f"name={quoted(name)}", "resume=auto")
    return PlannedRun(
        config=dataclasses.replace(config, name=name, resume="auto"),
        overrides=(*overrides, *own),
        labels=labels,
    )


def _points(study: str, settings: Settings) -> Iterator[Point]:
    """The cells and values of a study."""
    cells = cells_of(settings.scale)
    if study not in STUDIES:
        raise UserError(f"study={study}: must be one of {', '.join(STUDIES)}")
    for cell in cells:
        if study in ("all", f"table{cell.table}") or FIGURES.get(study) == cell.experiment:
            yield Point(cell.experiment, cell)
    for sweep, (experiment, key, values) in SWEEPS.items():
        if study in ("all", sweep):
            (cell,) = (cell for cell in cells if cell.experiment == experiment)
            for value in settings.chosen.sweeps.get(sweep, values).split():
                yield Point(f"{key.rpartition('.')[2]}={value}", cell, (f"{key}={value}",))


def _config(point: Point, settings: Settings) -> Config:
    """With seed 0 and no name."""
    config = _config_elsewhere(point, dataclasses.replace(settings, outputs="outputs"))
    root = settings.dataset_root(config.dataset.name)
    dataset = config.dataset if root is None else dataclasses.replace(config.dataset, root=root)
    return dataclasses.replace(config, dataset=dataset, output_root=str(settings.root))


@lru_cache(maxsize=1024)
def _config_elsewhere(point: Point, settings: Settings) -> Config:
    """The same, composed once wherever the runs are."""
    return parse(compose("train", _overrides(point, settings)).raw, needs_data=False)


def _overrides(point: Point, settings: Settings) -> list[str]:
    """The command line of train.py, without seed and name."""
    column = point.cell.column
    overrides = [f"experiment={point.cell.experiment}"]
    dataset = settings.dataset or settings.chosen.dataset
    if dataset is not None:
        overrides.append(f"dataset={dataset}")
    root = settings.dataset_root(dataset or DATASETS[column])
    if root is not None:
        overrides.append(f"dataset.root={quoted(root)}")
    stack = _stack(point.cell.experiment) if settings.chosen.stacks else set()
    overrides += settings.chosen.overrides(column, stack)
    overrides += [*point.change, f"devices={settings.devices}"]
    return [*overrides, f"output_root={quoted(str(settings.root))}"]


@lru_cache(maxsize=1024)
def _stack(experiment: str) -> set[str]:
    """The augmentations of an experiment."""
    return {*STACK} & {*compose("train", [f"experiment={experiment}"]).raw["augmentation"]}


def quoted(text: str) -> str:
    """As Hydra reads it back, whatever is in it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
