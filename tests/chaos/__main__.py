"""Kills runs and ranks, fills a disk, contends for a folder, and compares with undisturbed runs."""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reproduction.runs.folder import check_writable
from reproduction.system.errors import UserError, first_line
from reproduction.system.hardware import hardware_name
from reproduction.system.storage import write_text
from reproduction.system.terminal import one_line_errors, positive
from tests.chaos.folder import contend, fill_disk
from tests.chaos.kills import Moments, kill_ranks, kill_runs
from tests.chaos.runs import Outcome, Place
from tests.chaos.settings import evaluate_in_shares, vary_settings

MARK = "chaos"
Part = Callable[[Place, argparse.Namespace, Moments], Outcome]
PARTS: Mapping[str, Part] = {
    "kills": lambda place, args, moments: kill_runs(place, args.kills, moments),
    "ranks": lambda place, args, moments: kill_ranks(place, args.rank_kills, moments),
    "settings": lambda place, args, moments: vary_settings(place),
    "disk": lambda place, args, moments: fill_disk(place),
    "evaluation": lambda place, args, moments: evaluate_in_shares(place),
    "lock": lambda place, args, moments: contend(place.root, processes=4, rounds=500),
}


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="chaos", description=__doc__, usage=argparse.SUPPRESS)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="default: all")
    options.add_argument("--kills", type=positive, default=50, help="kills of whole runs")
    options.add_argument(
        "--rank-kills", type=positive, default=10, help="kills of one of two ranks"
    )
    options.add_argument("--minutes", type=positive, default=40, help="time limit for kills")
    options.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    options.add_argument("--page", metavar="FILE.md", help="put the tables on this page as well")
    options.add_argument("--outputs", default="outputs", help="folder of all outputs")
    return options


@one_line_errors("chaos")
def main() -> None:
    outcomes = run_chaos(parser().parse_args())
    sys.exit(any(outcome.differences for outcome in outcomes))


def run_chaos(args: argparse.Namespace) -> list[Outcome]:
    """Returns the outcome of each part; raises UserError before the first one starts."""
    folder = Path(args.outputs, "chaos").absolute()
    check_writable(folder / "chaos.json", f"outputs={args.outputs}")
    if args.page is not None:
        check_page(Path(args.page), MARK)
    moments = Moments(np.random.default_rng(args.seed), time.monotonic() + 60 * args.minutes)
    outcomes: list[Outcome] = []
    for name in args.parts:
        place, start = Place(folder / name, folder / f"{name}-logs"), time.perf_counter()
        place.clear()
        try:
            outcome = PARTS[name](place, args, moments)
        except (UserError, TimeoutError, subprocess.TimeoutExpired) as error:
            outcome = Outcome(name, {}, [first_line(error)])
        outcome.seconds = round(time.perf_counter() - start, 1)
        outcomes.append(outcome)
        print(summary_line(outcome), *outcome.differences, sep="\n  ", flush=True)
        write_outcomes(folder, outcomes, hardware_name("cpu"))
    if args.page is not None:
        put_on_page(Path(args.page), (folder / "chaos.md").read_text(), MARK)
    return outcomes


def write_outcomes(folder: Path, outcomes: Sequence[Outcome], machine: str) -> None:
    """Writes chaos.json, and chaos.md with a table of all parts."""
    content = {"machine": machine, "parts": [dataclasses.asdict(outcome) for outcome in outcomes]}
    write_text(folder / "chaos.json", json.dumps(content, indent=2) + "\n")
    summary = [
        {
            "part": outcome.part,
            "what": _counts(outcome),
            "differences": len(outcome.differences),
            "seconds": round(outcome.seconds),
        }
        for outcome in outcomes
    ]
    write_text(folder / "chaos.md", f"{machine}.\n\n{_table(summary)}\n")


def summary_line(outcome: Outcome) -> str:
    """Summarises an outcome in one line for the terminal."""
    return (
        f"{outcome.part}: {_counts(outcome)}; {len(outcome.differences)} differences; "
        f"{outcome.seconds:.0f} s"
    )


def _counts(outcome: Outcome) -> str:
    return ", ".join(f"{name} {count}" for name, count in outcome.counts.items())


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *([str(row.get(key, "")) for key in head] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def check_page(path: Path, mark: str) -> None:
    """Raises UserError unless the page has the marks between which the tables go."""
    _page_with(path, "", mark)


def put_on_page(path: Path, text: str, mark: str) -> None:
    """Replaces the text between `<!-- mark: begin -->` and `<!-- mark: end -->` on a page."""
    write_text(path, _page_with(path, text, mark))


def _page_with(path: Path, text: str, mark: str) -> str:
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    try:
        before, has_begin, rest = path.read_text().partition(begin)
    except OSError as error:
        raise UserError(f"page={path}: {error.strerror}") from error
    _, has_end, after = rest.partition(end)
    if not (has_begin and has_end):
        raise UserError(f"page={path}: has no {begin} and {end}")
    return f"{before}{begin}\n{text}{end}{after}"


if __name__ == "__main__":
    main()
