"""Measures what training costs here: steps, detectors, parts, gain matrix, pipeline, start-up."""

import argparse

from reproduction.benchmark.scope import SECTIONS
from reproduction.errors import PlainError, UserError


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    options.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    options.add_argument("--pairs", type=int, help="interleaved rounds (default: 40)")
    options.add_argument(
        "--sizes", nargs="+", default=(), metavar="MODEL:BATCH", help="of the training steps"
    )
    options.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options.add_argument("--quick", action="store_true", help="tiny sizes, to try it out")
    options.add_argument("--compare", metavar="OLD.json", help="print what got slower since")
    options.add_argument("--page", metavar="FILE.md", help="put the tables on this page as well")
    options.add_argument("--outputs", default="outputs", help="folder of all runs")
    return options


def main() -> None:
    options = parser()
    args = options.parse_args()
    try:
        from reproduction.benchmark.run import Request, run_benchmark

        folder, slower = run_benchmark(Request(**vars(args)))
    except UserError as error:
        options.exit(2, f"benchmark.py: {error}\n")
    except PlainError as error:
        options.exit(1, f"benchmark.py: {error}\n")
    print((folder / "benchmark.md").read_text())
    print(f"written to {folder}")
    if args.compare:
        print("\n".join(slower) or f"nothing got slower than in {args.compare}")


if __name__ == "__main__":
    main()
