"""Plans the runs of the paper's tables, figures and sweeps.

A study is `table1` to `table5`, `figure3`, `figure4`, `sweep-tau`, `sweep-rho`, `sweep-kappa` or
`all`. Does not import torch.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from reproduction.config import Config
from reproduction.reporting.cells import FULL, SCALES, Cell, Scale, read_cells
from reproduction.runs.compose import config_of
from reproduction.runs.folder import RunFolder, default_name, find_runs, run_hash
from reproduction.system.errors import UserError

# Each sweep: its base experiment, its key, and its values, which include the paper's own.
SWEEPS = {
    "sweep-tau": ("table1/cifar100_htm", "augmentation.htm.tau", "0 0.5 1 1.5 2 3 4 inf"),
    "sweep-rho": (
        "table1/cifar100_htm",
        "augmentation.htm.rho",
        "0 0.001 0.003 0.005 0.01 0.02 inf",
    ),
    "sweep-kappa": ("table1/cifar100_vtm", "augmentation.vtm.kappa", "1 3 5 10 20 40 80 160 256"),
}
# The experiment whose runs each figure shows.
FIGURES = {"figure3": "table1/cifar100_htm", "figure4": "table1/cifar100_htm"}
STUDIES = (*(f"table{number}" for number in range(1, 6)), *FIGURES, *SWEEPS, "all")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a study.

    `dataset`: an option of the group that replaces the data sets of the cells. `data`: its folder;
    without `dataset`, the folder of CIFAR, with ImageNet in `imagenet`. `outputs`: the folder of
    all runs; scales other than `full` have a folder of their own in it.
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
            raise UserError(f"scale={self.scale}: always uses {own}, leave dataset and data out")

    @property
    def chosen(self) -> Scale:
        return SCALES[self.scale]

    @property
    def root(self) -> Path:
        """The folder of the runs of this scale."""
        return Path(self.outputs) if self.scale == FULL else Path(self.outputs, self.scale)

    @property
    def uses_stand_ins(self) -> bool:
        """Whether to train on generated images: at smoke scale, unless `data` is set."""
        return self.scale == "smoke" and self.data is None

    def dataset_root(self, name: str) -> str | None:
        """Returns the folder of a data set, None for the default of its config file."""
        if self.uses_stand_ins:
            return None if name == "digits" else str(self.root / "data" / name)
        if self.data is None or self.dataset is not None or name != "imagenet1k":
            return self.data
        return str(Path(self.data, "imagenet"))


@dataclass(frozen=True)
class Point:
    """One cell, or one value of a sweep; `label` is its display name."""

    label: str
    cell: Cell
    change: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run with its seed and folder.

    `overrides` is its command line for train.py, `labels` names all points that it serves.
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
        """Whether the run is finished and has its report."""
        return self.folder.is_finished() and self.folder.report_path.exists()


def cells_of(scale: str) -> list[Cell]:
    """Returns the cells that a scale trains, in the paper's order."""
    return [cell for cell in read_cells() if cell.column in SCALES[scale].columns]


def point_configs(study: str, settings: Settings) -> dict[str, Config]:
    """Returns the configurations by experiment for cells, and by label (`tau=2`) for sweeps.

    They have seed 0 and no name: `find_runs(config.output_root)` has their folders by
    `run_hash(config)`. Images may be missing. Raises UserError for settings that do not fit
    together.
    """
    return {point.label: _config(point, settings) for point in _points(study, settings)}


def sweep_label(key: str, value: str) -> str:
    """Returns the name of a point of a sweep, such as `tau=2`."""
    return f"{key.rpartition('.')[2]}={value}"


def studies_of(scale: str) -> list[str]:
    """Returns the tables and sweeps with cells at this scale."""
    studies = [study for study in STUDIES if study not in ("all", *FIGURES)]
    return [study for study in studies if any(_points(study, Settings(scale=scale)))]


def plan(study: str, settings: Settings, seeds: int | None = None) -> list[PlannedRun]:
    """Returns the runs of a study, seed by seed; points of the same configuration share a run.

    Existing runs keep their names; new ones are named after the first cell of the paper with their
    configuration. Raises UserError for settings that do not fit together.
    """
    points = list(_points(study, settings))
    if not points:
        raise UserError(f"study={study}: has no cells at {settings.scale} scale")
    first_cells: dict[str, str] = {}
    for cell in cells_of(settings.scale):
        if not study.startswith("table") or cell.table <= int(study[-1]):
            key = run_hash(_config(Point(cell.experiment, cell), settings))
            first_cells.setdefault(key, cell.experiment)
    default = 1 if study == "figure3" else settings.chosen.seeds  # Figure 3 shows one model
    existing = find_runs(settings.root)
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(run_hash(_config(point, settings)), []).append(point)
    return [
        planned_run(
            _config(group[0], settings),
            _overrides(group[0], settings),
            seed,
            first_cells.get(key, group[0].cell.experiment),
            existing,
            tuple(point.label for point in group),
        )
        for seed in range(seeds or default)
        for key, group in groups.items()
    ]


def planned_run(
    config: Config,
    overrides: Sequence[str],
    seed: int,
    experiment: str,
    existing: Mapping[str, RunFolder],
    labels: tuple[str, ...],
) -> PlannedRun:
    """Sets the seed and the name: that of the existing folder, or a new one."""
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
                yield Point(sweep_label(key, value), cell, (f"{key}={value}",))


def _config(point: Point, settings: Settings) -> Config:
    """Returns the configuration of a point with seed 0 and no name."""
    config = _cached_config(point, dataclasses.replace(settings, outputs="outputs"))
    root = settings.dataset_root(config.dataset.name)
    dataset = config.dataset if root is None else dataclasses.replace(config.dataset, root=root)
    return dataclasses.replace(config, dataset=dataset, output_root=str(settings.root))


@lru_cache(maxsize=1024)
def _cached_config(point: Point, settings: Settings) -> Config:
    return config_of(_overrides(point, settings))


def _overrides(point: Point, settings: Settings) -> list[str]:
    """Returns the command line of train.py without seed and name."""
    overrides = [f"experiment={point.cell.experiment}"]
    dataset = settings.dataset or settings.chosen.dataset
    if dataset is not None:
        overrides.append(f"dataset={dataset}")
    root = settings.dataset_root(dataset or point.cell.dataset)
    if root is not None:
        overrides.append(f"dataset.root={quoted(root)}")
    stack: list[str] = []
    if settings.chosen.stacks:
        full = _cached_config(Point(point.cell.experiment, point.cell), Settings())
        stack = full.augmentation.stack
    overrides += settings.chosen.overrides(point.cell.column, stack)
    overrides += [*point.change, f"devices={settings.devices}"]
    return [*overrides, f"output_root={quoted(str(settings.root))}"]


def quoted(text: str) -> str:
    """Quotes any text for a Hydra override."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
