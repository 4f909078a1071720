"""Writes the paper's tables, sweeps and figures with our results, from run folders alone."""

import argparse

from reproduction.reporting.cells import FULL, SCALES
from reproduction.studies.overview import write_overview
from reproduction.studies.plan import DATASET_OPTIONS, Settings
from reproduction.system.terminal import ending_in_a_line


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    parser.add_argument("--outputs", default="outputs", help="folder of all runs")
    parser.add_argument("--scale", choices=SCALES, default=FULL, help="of the runs to report")
    parser.add_argument("--dataset", choices=DATASET_OPTIONS, help="in place of the tables' own")
    parser.add_argument("--data", help="its folder; without --dataset that of CIFAR and imagenet/")
    parser.add_argument("--devices", type=int, default=1, help="of the runs")
    return parser


@ending_in_a_line("report.py")
def main() -> None:
    """Prints the files that it writes to report/ beside the runs."""
    print(*write_overview(Settings(**vars(build_parser().parse_args()))), sep="\n")


if __name__ == "__main__":
    main()
