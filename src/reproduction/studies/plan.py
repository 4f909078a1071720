"""Plans the runs of studies: the paper's tables, figures and sweeps, or files of your own.

A name is `table1` to `table5`, `sweep-tau`, `sweep-rho`, `sweep-kappa`, a figure such as `figure3`,
`all`, or the path of a .yaml file. Does not import torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from reproduction.config import Config
from reproduction.runs.compose import config_of, error_context
from reproduction.runs.folder import RunFolder, find_runs
from reproduction.runs.identity import default_name, run_hash
from reproduction.studies.study import (
    BASELINE,
    FULL,
    SMOKE,
    SWEEPS,
    TABLES,
    Row,
    Settings,
    Study,
    papers_figures,
    papers_row,
    papers_studies,
    read_study,
    rows_at_scale,
)
from reproduction.system.errors import UserError

ALL = "all"
DEFAULTS = ("devices=1", "output_root='outputs'")  # left out, so that rows are composed once


def names() -> list[str]:
    """Returns the names of the paper's studies and numbered figures, and `all`."""
    figures = [name for name in papers_figures() if name.startswith("figure")]
    return [*TABLES, *figures, *SWEEPS, ALL]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A row of a study at a scale, with its command line and its configuration for seed 0."""

    study: str
    name: str
    row: Row
    overrides: tuple[str, ...]
    config: Config

    @property
    def label(self) -> str:
        return f"{self.study}/{self.name}"

    @property
    def against(self) -> str | None:
        """The label of the row that it is tested against."""
        name = self.row.against
        return name if name is None or "/" in name else f"{self.study}/{name}"

    @property
    def is_shown_only(self) -> bool:
        """Whether it is the baseline of a sweep, which a table trains."""
        return self.study in SWEEPS and self.name == BASELINE

    @property
    def key(self) -> str:
        """The identity that its runs share, whatever their seed."""
        return run_hash(self.config)


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run with its seed and folder, and the labels of all points that it serves.

    `overrides` is its command line for train.py.
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


def studies_of(name: str) -> dict[str, Study]:
    """Returns the studies of a name by their own names; UserError if there are none."""
    papers = papers_studies()
    if name == ALL:
        return dict(papers)
    if name in papers:
        return {name: papers[name]}
    if name in papers_figures():
        table, figure = papers_figures()[name]
        rows = {figure.of: papers[table].rows[figure.of]}
        return {table: replace(papers[table], rows=rows, seeds=figure.seeds)}
    path = Path(name)
    if not (name.endswith(".yaml") and path.is_file()):
        allowed = f"must be one of {', '.join(names())}, or an existing .yaml file"
        raise UserError(f"study={name}: {allowed}")
    return {path.stem: read_study(path)}


def points_of(studies: Mapping[str, Study], settings: Settings) -> list[Point]:
    """Returns the rows of studies that are trained at the scale. Images may be missing.

    Raises UserError for a row that cannot be composed, or a study without this scale.
    """
    return [x for name, study in studies.items() for x in _points(name, study, settings)]


def _points(name: str, study: Study, settings: Settings) -> Iterator[Point]:
    own = None if name in papers_studies() else study
    if own is not None:
        _check_own(name, own, settings)
    only = settings.chosen.only if own is None else None
    for key, row in rows_at_scale(study, settings.scale).items():
        if (only is None or row.column in only) and not row.is_open:
            with error_context(f"{name}.yaml: {key}") if own is not None else nullcontext():
                overrides = tuple(_overrides(row, own, settings))
                config = _config(row, own, settings)
            shown = row
            if study.sweep is not None and key != BASELINE:
                shown = _with_printed(row, study.sweep.own, config, settings)
            yield Point(study=name, name=key, row=shown, overrides=overrides, config=config)


def _with_printed(row: Row, own: str, config: Config, settings: Settings) -> Row:
    """Gives the value of a sweep that is the paper's own its printed accuracies."""
    papers = papers_row(own)
    if run_hash(_config(papers, None, settings)) != run_hash(config):
        return row
    return replace(row, row=f"{row.row} (as in Table {own[len('table')]})", printed=papers.printed)


def keys_of(points: Sequence[Point], settings: Settings) -> dict[str, str]:
    """Returns the keys by label of all points and of the rows that they are tested against."""
    keys = {point.label: point.key for point in points}
    for base in [point.against for point in points]:
        if base is not None and base not in keys:
            keys[base] = run_hash(_config(papers_row(base), None, settings))
    return keys


def plan(name: str, settings: Settings, seeds: int | None = None) -> list[PlannedRun]:
    """Returns the runs of a study, seed by seed; points of the same configuration share a run.

    Existing runs keep their names, new ones are named after their first row in the paper. Raises
    UserError for settings that do not fit together.
    """
    studies = studies_of(name)
    for key, row in [pair for study in studies.values() for pair in study.rows.items()]:
        if row.is_open:
            raise UserError(
                f"study={name}: rows.{key}: has a value ???, which its pilot must choose"
            )
    groups: dict[str, list[Point]] = {}
    for point in points_of(studies, settings):
        if not point.is_shown_only:
            groups.setdefault(point.key, []).append(point)
    if not groups:
        raise UserError(f"study={name}: has no rows at {settings.scale} scale")
    existing, firsts = find_runs(settings.root), _first_rows(studies, settings)
    own = min((study.seeds for study in studies.values() if study.seeds), default=None)
    scaled = settings.chosen.seeds if settings.scale != FULL or own is None else own
    if own is not None and name in papers_figures():
        scaled = own  # a figure shows so many, at every scale
    start = max(study.first_seed for study in studies.values())
    return [
        _planned(firsts.get(key, group[0]), group, seed, existing)
        for seed in range(start, start + (seeds or scaled))
        for key, group in groups.items()
    ]


def _planned(
    first: Point, group: Sequence[Point], seed: int, existing: Mapping[str, RunFolder]
) -> PlannedRun:
    config = replace(group[0].config, seed=seed)
    folder = existing.get(run_hash(config))
    name = folder.path.name if folder else _name(first, config)
    own = (f"seed={seed}", f"name={quoted(name)}", "resume=auto")
    return PlannedRun(
        config=replace(config, name=name, resume="auto"),
        overrides=(*group[0].overrides, *own),
        labels=tuple(point.label for point in group),
    )


def _name(point: Point, config: Config) -> str:
    if point.study in SWEEPS:
        return default_name(config, point.row.experiment, point.row.value)
    return default_name(config, point.label)


def _first_rows(studies: Mapping[str, Study], settings: Settings) -> dict[str, Point]:
    """Returns the paper's first row of each configuration, which names its runs."""
    first: dict[str, Point] = {}
    last = max((TABLES.index(name) for name in studies if name in TABLES), default=-1)
    tables = TABLES[: last + 1] if not {*studies} & {*SWEEPS} else TABLES
    chosen = tables if {*studies} & {*TABLES, *SWEEPS} else ()
    for point in points_of({name: papers_studies()[name] for name in chosen}, settings):
        first.setdefault(point.key, point)
    return first


def _check_own(name: str, study: Study, settings: Settings) -> None:
    """Raises UserError for a scale or data set that a study of your own does not have."""
    if settings.dataset is not None:
        raise UserError(f"{name}.yaml: fixes its data set, leave dataset out")
    if settings.scale not in (FULL, *study.scales):
        allowed = " or ".join([FULL, *study.scales])
        raise UserError(f"{name}.yaml: scale={settings.scale}: allowed is {allowed}")


def _overrides(row: Row, own: Study | None, settings: Settings) -> list[str]:
    """Returns the command line of train.py without seed and name; later words count more.

    What the row trains, on which data, with what the scale changes, a sweep's value, and where.
    `own` is a study of your own, whose file says what its scales change.
    """
    scale, full = settings.chosen, _composed(tuple(row.command))
    dataset = settings.dataset or scale.dataset or ("digits" if settings.uses_stand_ins else None)
    root = settings.dataset_root(dataset or full.dataset.name)
    if own is None:
        changed = [*scale.overrides, *scale.columns.get(row.column, [])]
    else:
        changed = own.scales["smoke"] if settings.scale == SMOKE else []
    return [
        *row.command,
        *([f"dataset={dataset}"] if dataset else []),
        *([f"dataset.root={quoted(root)}"] if root is not None else []),
        *changed,
        *scale.of_stack(full.augmentation.stack),
        *row.value,
        f"devices={settings.devices}",
        f"output_root={quoted(str(settings.root))}",
    ]


def _config(row: Row, own: Study | None, settings: Settings) -> Config:
    """Returns the configuration with seed 0 and no name; the cache does not depend on `outputs`."""
    words = _overrides(row, own, replace(settings, outputs="outputs"))
    config = _composed(tuple(word for word in words if word not in DEFAULTS))
    root = settings.dataset_root(config.dataset.name)
    dataset = config.dataset if root is None else replace(config.dataset, root=root)
    return replace(config, dataset=dataset, output_root=str(settings.root))


@lru_cache(maxsize=1024)
def _composed(overrides: tuple[str, ...]) -> Config:
    return config_of(overrides)


def quoted(text: str) -> str:
    """Quotes any text for a Hydra override."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
