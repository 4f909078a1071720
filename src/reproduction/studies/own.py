"""A study of one's own: a file that fixes its runs and comparisons before the first run."""

import dataclasses
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from reproduction.config import FORBID, Count, FolderName
from reproduction.reporting.cells import FULL
from reproduction.runs.compose import compose, explaining
from reproduction.runs.folder import default_name, find_runs, run_hash
from reproduction.runs.parse import parse
from reproduction.studies.plan import PlannedRun, Settings, quoted
from reproduction.system.errors import UserError, first_line
from reproduction.system.reading import parse_yaml


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Contrast:
    """Two stacks whose accuracies after the last epoch are compared."""

    of: str
    against: str


@dataclass(config=FORBID, frozen=True, kw_only=True)
class OwnStudy:
    """What the file says: `overrides` of train.py for all runs, more of them by stack."""

    title: str
    about: str
    pilot: str
    overrides: list[str]
    stacks: Annotated[dict[FolderName, list[str]], Field(min_length=1)]
    seeds: Count
    contrasts: list[Contrast]


def read_study(path: Path) -> OwnStudy:
    """The study that a file fixes; UserError names the file and what is wrong with it."""
    try:
        study = TypeAdapter(OwnStudy).validate_python(parse_yaml(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {key}: {first['msg']}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable: {first_line(error)}") from error
    for contrast in study.contrasts:
        for name in (contrast.of, contrast.against):
            if name not in study.stacks:
                known = ", ".join(study.stacks)
                raise UserError(f"{path}: contrasts: {name} is no stack, allowed: {known}")
    return study


def plan_own(path: Path, settings: Settings, seeds: int | None = None) -> list[PlannedRun]:
    """All runs, seed by seed; a run that exists keeps its name."""
    if settings.scale != FULL or settings.dataset is not None:
        raise UserError(f"{path}: fixes its scale and data set, leave scale and dataset out")
    study, existing = read_study(path), find_runs(settings.root)
    runs = []
    for seed in range(seeds or study.seeds):
        for stack, own in study.stacks.items():
            told = [*study.overrides, *own, f"seed={seed}", f"devices={settings.devices}"]
            told.append(f"output_root={quoted(str(settings.root))}")
            if settings.data is not None:
                told.append(f"dataset.root={quoted(settings.data)}")
            with explaining(f"{path}: {stack}"):
                config = parse(compose("train", told).raw, needs_data=False)
            folder = existing.get(run_hash(config))
            name = default_name(config, f"{path.stem}/{stack}")
            name = name if folder is None else folder.path.name
            runs.append(
                PlannedRun(
                    config=dataclasses.replace(config, name=name, resume="auto"),
                    overrides=(*told, f"name={quoted(name)}", "resume=auto"),
                    labels=(stack,),
                )
            )
    return runs
