"""Trains the runs of a plan, one after the other or some at a time.

Finished runs are skipped, interrupted ones resumed, and runs that another process trains left
alone: a second start of the command trains what is left.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from reproduction.config import TRAIN
from reproduction.runs.identity import FIXED
from reproduction.runs.locking import is_held
from reproduction.start.processes import Processes, Share, shares
from reproduction.start.resolve import check_all, check_data
from reproduction.studies.study import Point
from reproduction.system.errors import (
    PlainError,
    RunInterrupted,
    RunLocked,
    UserError,
    first_line,
)
from reproduction.system.terminal import say, warn

# Trains a run, announced after a text such as `run 2 of 12: `; returns the error or None.
# Raises RunLocked if another process trains it, and KeyboardInterrupt if this process is to stop.
Start = Callable[[Point, str], str | None]


def prepare(runs: Sequence[Point]) -> None:
    """Checks all runs that are to be trained. Raises UserError before the first run starts."""
    is_done = [_is_done(run) for run in runs]
    pending = [run for run, done in zip(runs, is_done, strict=True) if done is False]
    for run, done in zip(runs, is_done, strict=True):
        if done:
            _check_done(run)
    if pending:  # avoids importing torch otherwise
        check_all([run.config for run in pending])


def _is_done(run: Point) -> bool | None:
    """Whether the run is done; None if its folder is not readable, so that it fails on its own."""
    try:
        return run.is_done()
    except UserError:
        return None


def _check_done(run: Point) -> None:
    """Raises UserError if it was trained on other images than are there now, if any are."""
    data = run.config.dataset
    if not data.is_own and data.name not in FIXED:
        check_data(run.folder, run.config)


def train_all(
    runs: Sequence[Point],
    start: Start,
    each: Callable[..., Iterable[str | None]] = map,
) -> dict[str, str]:
    """Starts all runs that are not done, by `each`, a `map`; returns errors by run."""
    total = len(runs)

    def outcome(numbered: tuple[int, Point]) -> str | None:
        number, run = numbered
        try:
            place = f"run {number} of {total}: " if total > 1 else ""
            return None if run.is_done() else start(run, place)
        except RunLocked as locked:
            say(f"{locked}; left to it")
            return None
        except UserError as error:
            return str(error)

    outcomes = each(outcome, enumerate(runs, 1))
    return {
        str(x.config.name): error
        for x, error in zip(runs, outcomes, strict=True)
        if error is not None
    }


def train_all_apart(
    runs: Sequence[Point],
    shares: Sequence[Share] = ({},),
    logs: Path | None = None,
) -> dict[str, str]:
    """Like train_all, with a process for each run; each share of the machine has one at a time.

    `logs` is a folder for their output.
    """
    if logs is not None:
        say(f"{len(shares)} runs at a time, logs in {logs}")
    with Processes(shares, logs) as processes:
        return train_all(runs, partial(_train_apart, processes), processes.map)


def _train_apart(processes: Processes, run: Point, place: str) -> str | None:
    try:
        processes.check()
        _announce(run, place)
        status, error = processes.run(str(run.config.name), TRAIN, run.words)
    except RunInterrupted:
        raise RunInterrupted("interrupted; the same command resumes") from None
    if status == 0 and run.is_done():
        return None
    _refuse_held(run)  # another process was faster
    return error


def train_here(run: Point, place: str) -> str | None:
    """Trains a run in this process, for small runs."""
    from reproduction.reporting.report import write_report
    from reproduction.training.run import run_training

    _announce(run, place)
    try:
        write_report(run.folder, run_training(run.config))
    except RunLocked:
        raise
    except (UserError, PlainError) as error:
        warn(str(error))
        return str(error)
    except Exception as error:
        traceback.print_exc()
        return first_line(error)
    return None


def _announce(run: Point, place: str) -> None:
    """Prints that a run starts; RunLocked if another process trains it."""
    _refuse_held(run)
    verb = "resuming" if run.folder.checkpoints() else "starting"
    say(f"{place}{verb} {run.config.name}")


def _refuse_held(run: Point) -> None:
    if is_held(run.folder):
        raise RunLocked(f"{run.folder.path} is being trained by another process")


def train(runs: Sequence[Point], jobs: int | None, logs: Path) -> dict[str, str]:
    """Trains in turn in this process, or some at a time; returns errors by run."""
    if jobs is None:
        return train_all(runs, train_here)
    return train_all_apart(runs, shares(jobs, runs[0].config.devices), logs)


def train_task(runs: Sequence[Point], number: int) -> NoReturn:
    """Becomes train.py for run `number` of the plan, as a task of a job array does."""
    if not 0 <= number < len(runs):
        last = len(runs) - 1
        raise UserError(f"task={number}: must be 0..{last}, as the plan has {len(runs)} runs")
    if runs[number].is_done():
        _check_done(runs[number])
        say(f"{runs[number].config.name} is finished")
        sys.exit(0)
    command = [sys.executable, str(TRAIN), *runs[number].words]
    os.execv(sys.executable, command)  # noqa: S606 - without a shell
