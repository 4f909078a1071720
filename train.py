"""Trains one run, or all points of a sweep: python train.py [-m] [key=value ...]."""

from reproduction.config import Config
from reproduction.runs.folder import RunFolder
from reproduction.start.command import run
from reproduction.start.resolve import check_all, resolve
from reproduction.system.terminal import say


def main(config: Config) -> None:
    """Trains one run on its ranks and writes its report."""
    from reproduction.reporting.report import write_report
    from reproduction.training.run import run_training

    summary = run_training(config)
    write_report(RunFolder.of(config), summary)


def conclude(configs: list[Config]) -> None:
    """Prints the table of a sweep, and where it and its plot are written."""
    from reproduction.studies.table import write_sweep

    folders = [RunFolder.of(config).path for config in configs]
    table, files = write_sweep([path for path in folders if path.is_dir()], folders[0].parent)
    say(f"\n{table}")
    say(f"written to {', '.join(map(str, files))}")


if __name__ == "__main__":
    run("train", resolve, check_all, main, conclude)
