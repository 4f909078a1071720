"""All parts, one after the other."""

import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reproduction.chaos.disk import fill_disk
from reproduction.chaos.harm import harm_files
from reproduction.chaos.kills import kill_ranks, kill_runs
from reproduction.chaos.locks import contend
from reproduction.chaos.report import MARK, line, write_outcomes
from reproduction.chaos.runs import Outcome, Place
from reproduction.chaos.settings import vary_settings
from reproduction.chaos.shares import evaluate_in_shares
from reproduction.errors import UserError, first_line
from reproduction.hardware import hardware_name
from reproduction.runs import check_writable
from scripts.benchmark.page import check_page


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for. No run is killed any more after `minutes`."""

    parts: list[str]
    kills: int
    rank_kills: int
    minutes: int
    seed: int
    outputs: str
    page: str | None


def run_chaos(request: Request) -> list[Outcome]:
    """What came of each part; UserError before anything begins."""
    folder = Path(request.outputs, "chaos")
    check_writable(folder / "chaos.json", f"outputs={request.outputs}")
    if request.page is not None:
        check_page(Path(request.page), MARK)
    parts, outcomes = _parts(request, folder.absolute()), []
    for name in request.parts:
        start = time.perf_counter()
        outcome = _outcome(name, parts[name])
        outcome.seconds = round(time.perf_counter() - start, 1)
        outcomes.append(outcome)
        print(line(outcome), *outcome.differences, sep="\n  ", flush=True)
        page = request.page if name == request.parts[-1] else None
        write_outcomes(folder, outcomes, hardware_name("cpu"), page)
    return outcomes


def _outcome(name: str, part: Callable[[], Outcome]) -> Outcome:
    """What came of a part; one that is refused or hangs is a finding, and the others go on."""
    try:
        return part()
    except (UserError, TimeoutError, subprocess.TimeoutExpired) as error:
        return Outcome(name, {}, [first_line(error)])


def _parts(request: Request, folder: Path) -> Mapping[str, Callable[[], Outcome]]:
    deadline = time.monotonic() + 60 * request.minutes
    rng = np.random.default_rng(request.seed)

    def place(name: str) -> Place:
        where = Place(folder / name, folder / f"{name}-logs")
        where.clear()
        return where

    return {
        "kills": lambda: kill_runs(place("kills"), request.kills, deadline, rng),
        "ranks": lambda: kill_ranks(place("ranks"), request.rank_kills, deadline, rng),
        "settings": lambda: vary_settings(place("settings")),
        "disk": lambda: fill_disk(place("disk")),
        "evaluation": lambda: evaluate_in_shares(place("evaluation")),
        "lock": lambda: contend(place("lock").root, processes=4, rounds=500),
        "files": lambda: harm_files(place("files"), request.seed),
    }
