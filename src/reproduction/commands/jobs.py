"""What is checked of each point of a command line, and of each run of a study."""

import dataclasses
from collections import Counter

from reproduction.config.schema import Config
from reproduction.runs.compose import Composed
from reproduction.runs.folder import RunFolder
from reproduction.runs.identity import default_name
from reproduction.runs.parse import parse
from reproduction.system.errors import UserError


def resolve(composed: Composed) -> Config:
    """The typed configuration of one point, with the name of its run."""
    config = parse(composed.raw)
    name = config.name or default_name(config, composed.experiment)
    return dataclasses.replace(config, name=name)


def check_all(configs: list[Config], here: bool = True) -> None:
    """Refuses what keeps any point from running, before the first one starts.

    The devices of runs that will not be `here` are left to the machine that they will be on.
    """
    folders = [RunFolder.of(config) for config in configs]
    for folder, config in zip(folders, configs, strict=True):
        folder.check(config)
    path, points = Counter(folder.path for folder in folders).most_common(1)[0]
    if points > 1:
        raise UserError(
            f"name={path.name}: {points} points of the sweep are this one run, leave name out and "
            "sweep over what changes a result"
        )
    from reproduction.training.preflight import preflight  # torch: only when all else is right

    for folder, config in zip(folders, configs, strict=True):
        if not folder.is_finished():
            preflight(config, here)
