"""Kills runs and ranks, fills a disk, contends for a folder, and compares with undisturbed runs."""

import argparse
import sys

from reproduction.chaos import PARTS
from reproduction.errors import UserError
from reproduction.terminal import positive


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument("--kills", type=positive, default=50, help="of whole runs")
    options.add_argument("--rank-kills", type=positive, default=10, help="of one of two ranks")
    options.add_argument("--minutes", type=positive, default=40, help="after which no more kills")
    options.add_argument("--seed", type=int, default=0, help="of the moments")
    options.add_argument("--page", metavar="FILE.md", help="put the tables on this page as well")
    options.add_argument("--outputs", default="outputs", help="folder of all runs")
    return options


def main() -> None:
    options = parser()
    args = options.parse_args()
    try:
        from reproduction.chaos.run import Request, run_chaos

        outcomes = run_chaos(Request(**vars(args)))
    except UserError as error:
        options.exit(2, f"chaos.py: {error}\n")
    sys.exit(any(outcome.differences for outcome in outcomes))


if __name__ == "__main__":
    main()
