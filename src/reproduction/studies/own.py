"""A study of your own: a file that fixes its runs and comparisons before the first run."""

from itertools import chain
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from reproduction.config import FORBID, Count, FolderName, folder_name
from reproduction.reporting.cells import FULL
from reproduction.runs.compose import config_of, error_context
from reproduction.runs.folder import default_name, find_runs
from reproduction.studies.plan import PlannedRun, Settings, planned_run, quoted
from reproduction.system.errors import UserError, first_line
from reproduction.system.reading import parse_yaml

OWN_KEYS = ("seed", "devices", "name", "output_root", "resume")  # set for each run of a plan


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Contrast:
    """Two stacks whose accuracies after the last epoch are compared."""

    of: str
    against: str


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Quoted:
    """Published results with the same protocol, in percent, by row and column."""

    source: str
    columns: list[str]
    rows: dict[str, list[float]]


@dataclass(config=FORBID, frozen=True, kw_only=True)
class OwnStudy:
    """The content of the file: `overrides` of train.py for all runs, and more for each stack.

    `smoke`: further overrides at smoke scale, on stand-in images; without them the study has no
    smoke scale.
    """

    title: str
    about: str
    pilot: str
    overrides: list[str]
    stacks: Annotated[dict[FolderName, list[str]], Field(min_length=1)]
    seeds: Count
    contrasts: list[Contrast]
    smoke: list[str] = Field(default_factory=list)
    quoted: Quoted | None = None


def read_study(path: Path) -> OwnStudy:
    """Reads the file of a study; UserError names the file and the problem."""
    try:
        study = TypeAdapter(OwnStudy).validate_python(parse_yaml(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "must be a mapping of settings"
        raise UserError(f"{path}: {key}: {first['msg']}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable: {first_line(error)}") from error
    for override in chain(study.overrides, study.smoke, *study.stacks.values()):
        if (key := override.lstrip("+~").partition("=")[0]) in OWN_KEYS:
            raise UserError(f"{path}: {override}: a study must not set {key}")
    for contrast in study.contrasts:
        for name in (contrast.of, contrast.against):
            if name not in study.stacks:
                known = ", ".join(study.stacks)
                raise UserError(f"{path}: contrasts: {name} is no stack, allowed: {known}")
    return study


def plan_own(path: Path, settings: Settings, seeds: int | None = None) -> list[PlannedRun]:
    """Returns all runs, seed by seed; existing runs keep their names."""
    study, existing = read_study(path), find_runs(settings.root)
    if settings.dataset is not None:
        raise UserError(f"{path}: fixes its data set, leave dataset out")
    scales = [FULL, *(["smoke"] if study.smoke else [])]
    if settings.scale not in scales:
        raise UserError(f"{path}: scale={settings.scale}: allowed is {' or '.join(scales)}")
    stacks = {}
    for stack, own in study.stacks.items():
        with error_context(f"{path}: {stack}"):
            overrides = [*study.overrides, *own]
            overrides += _scale_overrides(study, overrides, settings)
            overrides += [
                f"devices={settings.devices}",
                f"output_root={quoted(str(settings.root))}",
            ]
            config = config_of(overrides)
            folder_name(default_name(config, f"{path.stem}/{stack}"))  # raises for a bad name
            stacks[stack] = overrides, config
    default = study.seeds if settings.scale == FULL else 1
    return [
        planned_run(config, overrides, seed, f"{path.stem}/{stack}", existing, (stack,))
        for seed in range(seeds or default)
        for stack, (overrides, config) in stacks.items()
    ]


def _scale_overrides(study: OwnStudy, overrides: list[str], settings: Settings) -> list[str]:
    """Returns the overrides of a stack for the scale and the folder of the images."""
    config = config_of(overrides)
    root = settings.dataset_root(config.dataset.name)
    paths = [] if root is None else [f"dataset.root={quoted(root)}"]
    if settings.scale == FULL:
        return paths
    mixing = settings.chosen.stack_overrides(config.augmentation.stack)
    return [*study.smoke, *mixing, *paths]
