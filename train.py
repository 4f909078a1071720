"""Trains one run, or all points of a sweep: python train.py [-m] [key=value ...]."""

from reproduction.commands.cli import run
from reproduction.commands.jobs import check_all, resolve
from reproduction.config import Config
from reproduction.runs.folder import RunFolder


def main(config: Config) -> None:
    """Trains one run on its ranks and writes its report."""
    from reproduction.reporting.report import write_report
    from reproduction.training.train import run_training

    summary = run_training(config)
    write_report(RunFolder.of(config), summary)


if __name__ == "__main__":
    run("train", resolve, check_all, main)
