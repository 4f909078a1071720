"""Writes the paper's tables, sweeps and figures with our results, from run folders alone."""

import argparse

from reproduction.commands.cli import one_line
from reproduction.reporting.cells import FULL, SCALES
from reproduction.studies.overview import write_overview
from reproduction.studies.plan import DATASET_OPTIONS, Settings
from reproduction.system.errors import UserError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    parser.add_argument("--outputs", default="outputs", help="folder of all runs")
    parser.add_argument("--scale", choices=SCALES, default=FULL, help="of the runs to report")
    parser.add_argument("--dataset", choices=DATASET_OPTIONS, help="in place of the tables' own")
    parser.add_argument("--data", help="its folder; without --dataset that of CIFAR and imagenet/")
    parser.add_argument("--devices", type=int, default=1, help="of the runs")
    return parser


def main() -> None:
    """Prints the files that it writes to report/ beside the runs."""
    parser = build_parser()
    try:
        print(*write_overview(Settings(**vars(parser.parse_args()))), sep="\n")
    except UserError as error:
        parser.exit(2, f"report.py: {one_line(error)}\n")


if __name__ == "__main__":
    main()
