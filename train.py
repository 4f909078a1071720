"""Trains one run, or every point of a sweep: python train.py [-m] [key=value ...]."""

import dataclasses
from collections import Counter

from reproduction.cli import Composed, run
from reproduction.config import Config
from reproduction.errors import UserError
from reproduction.parse import parse
from reproduction.ranks import is_first_rank
from reproduction.runs import RunFolder, default_name


def resolve(composed: Composed) -> Config:
    """The typed configuration of one point, with the name of its run."""
    config = parse(composed.raw)
    name = config.name or default_name(config, composed.experiment)
    return dataclasses.replace(config, name=name)


def check_all(configs: list[Config]) -> None:
    """Refuses run folders that are taken, before the first point starts."""
    for config in configs:
        RunFolder.of(config).check(config)
    name, points = Counter(config.name for config in configs).most_common(1)[0]
    if points > 1:
        raise UserError(f"name={name}: {points} points of the sweep share it, leave name out")


def main(config: Config) -> None:
    """Trains one run and writes its report."""
    from reproduction.reporting.report import write_report
    from reproduction.training.train import run_training

    summary = run_training(config)
    if is_first_rank():
        write_report(RunFolder.of(config), summary)


if __name__ == "__main__":
    run("train", resolve, check_all, main)
