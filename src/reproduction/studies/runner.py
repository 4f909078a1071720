"""Trains the runs of a plan: skips finished runs, resumes interrupted ones, retries failed ones.

At full and short scale, and with several runs at a time, each run has its own process; the small
runs of other scales share this one.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import IO, Self

from reproduction.commands.jobs import check_all
from reproduction.commands.launchers import gpu_share
from reproduction.config import TRAIN
from reproduction.data.folders import missing_data
from reproduction.data.stand_ins import make_stand_ins
from reproduction.runs.locking import is_held
from reproduction.studies.plan import PlannedRun, Settings
from reproduction.system.errors import (
    STOP_SIGNALS,
    PlainError,
    RunInterrupted,
    RunLocked,
    UserError,
    first_line,
)
from reproduction.system.hardware import usable_cores

ATTEMPTS = 2
POLL_SECONDS = 10.0

# Trains a run, announced after a text such as `run 2 of 12: `; returns the error or None.
# Raises RunLocked if another process trains it, and KeyboardInterrupt if this process is to stop.
Start = Callable[[PlannedRun, str], str | None]
SIGNALS = (*STOP_SIGNALS, signal.SIGHUP)
JOBS_WITHOUT_GPUS = 2
Share = dict[str, str]  # environment variables


def prepare(runs: list[PlannedRun], settings: Settings, here: bool = True) -> None:
    """Makes stand-in images if the settings use them, and checks all runs that are to be trained.

    Downloads data sets where possible. Raises UserError before the first run starts. Devices are
    not checked unless the runs train on this machine (`here`).
    """
    pending = [run for run in runs if may_train(run)]
    if settings.uses_stand_ins:
        for name in {run.config.dataset.name for run in pending} - {"digits"}:
            make_stand_ins(name, Path(str(settings.dataset_root(name))))
    for run in pending:
        if problem := missing_data(run.config.dataset.name, run.config.dataset.root):
            raise UserError(problem)
    if pending:  # avoids importing torch otherwise
        check_all([run.config for run in pending], here)


def may_train(run: PlannedRun) -> bool:
    """Whether the run is not done and its folder is readable; otherwise it fails on its own."""
    try:
        return not run.is_done()
    except UserError:
        return False


def train_all(
    runs: list[PlannedRun], start: Start, jobs: int = 1, poll: float = POLL_SECONDS
) -> dict[str, str]:
    """Trains all runs that are not done; returns the last error of each failed run by its name.

    Trains `jobs` runs at a time, in threads if there are several. Failed runs are retried once
    after the others. Runs that another process trains are waited for at the end, and polled every
    `poll` seconds.
    """
    attempts, failed, announced = Counter[str](), dict[str, str](), set[str]()
    total = len(runs)
    places = {x.name: f"run {i} of {total}: " if total > 1 else "" for i, x in enumerate(runs, 1)}
    while runs:
        held, again = list[PlannedRun](), list[PlannedRun]()
        for run, outcome in zip(runs, _outcomes(runs, start, jobs, places), strict=True):
            failed.pop(run.name, None)
            if isinstance(outcome, RunLocked):
                if run.name not in announced:
                    print(f"{outcome}; waiting for it after the other runs", flush=True)
                announced.add(run.name)
                held.append(run)
            elif outcome is not None:
                failed[run.name] = outcome
                attempts[run.name] += 1
                if attempts[run.name] < ATTEMPTS:
                    again.append(run)
        if len(held) == len(runs):
            time.sleep(poll)
        runs = again + held
    return failed


def _outcomes(
    runs: list[PlannedRun], start: Start, jobs: int, places: dict[str, str]
) -> Iterator[str | RunLocked | None]:
    """Yields the outcome of each run in their order."""

    def outcome(run: PlannedRun) -> str | RunLocked | None:
        try:
            return None if run.is_done() else start(run, places[run.name])
        except RunLocked as locked:
            return locked
        except UserError as error:
            return str(error)

    if jobs == 1:
        yield from map(outcome, runs)
        return
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(outcome, runs)


def train_here(run: PlannedRun, place: str) -> str | None:
    from reproduction.reporting.report import write_report
    from reproduction.training.train import run_training

    _announce(run, place)
    try:
        write_report(run.folder, run_training(run.config))
    except RunLocked:
        raise
    except (UserError, PlainError) as error:
        print(error, file=sys.stderr)
        return str(error)
    except Exception as error:
        traceback.print_exc()
        return first_line(error)
    return None


def train_all_apart(
    runs: list[PlannedRun], at_once: Sequence[Share] = ({},), logs: Path | None = None
) -> dict[str, str]:
    """Like train_all, with a process for each run; each share of the machine has one at a time.

    `logs` is a folder for their output.
    """
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        print(f"{len(at_once)} runs at a time, logs in {logs}", flush=True)
    with Children(at_once) as children:
        start = partial(train_apart, children=children, logs=logs)
        return train_all(runs, start, len(at_once))


def train_apart(
    run: PlannedRun, place: str, children: "Children", logs: Path | None = None
) -> str | None:
    if children.signals:
        raise RunInterrupted("interrupted")
    _announce(run, place)
    log = nullcontext() if logs is None else (logs / f"{run.name}.log").open("a")
    with log as output, tempfile.TemporaryFile("w+") as errors:
        status = children.run([sys.executable, str(TRAIN), *run.overrides], output, errors)
        errors.seek(0)
        stderr = errors.read()
        (output or sys.stderr).write(stderr)
    if children.signals:
        raise RunInterrupted(f"interrupted; the same command resumes {run.folder.path}")
    if status == 0 and run.is_done():
        return None
    _refuse_held(run)  # another process was faster
    if stderr.strip():
        return stderr.strip().splitlines()[-1]
    if status < 0:
        return f"train.py was ended by {signal.Signals(-status).name}"
    return f"train.py ended with status {status} and left no finished run"


def _announce(run: PlannedRun, place: str) -> None:
    """Prints that a run starts; RunLocked if another process trains it."""
    _refuse_held(run)
    verb = "resuming" if run.folder.checkpoints() else "starting"
    print(f"{place}{verb} {run.name}", flush=True)


def _refuse_held(run: PlannedRun) -> None:
    if is_held(run.folder):
        raise RunLocked(f"{run.folder.path} is being trained by another process")


def shares(jobs: int | None, devices: int) -> list[Share]:
    """Divides this machine among `jobs` runs at a time, each with `devices` processes.

    GPUs are assigned in turn, cores are divided. The default of `jobs` is as many as fit on
    separate GPUs, or 2 without GPUs.
    """
    from reproduction.training.distributed import visible_gpus

    gpus = visible_gpus()
    if jobs is None:
        jobs = max(1, len(gpus) // devices) if gpus else JOBS_WITHOUT_GPUS
    threads = str(max(1, usable_cores() // (jobs * devices)))
    cores = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    if not gpus:
        return [cores] * jobs
    return [
        cores | {"CUDA_VISIBLE_DEVICES": gpu_share(gpus, number, devices)} for number in range(jobs)
    ]


class Children:
    """Runs commands from any thread, one at a time for each of the shares.

    As a context manager it forwards signals: SIGTERM for the first one that this process receives,
    SIGKILL for the second. On SIGTERM train.py stops after a step and resumes there; after SIGKILL
    it resumes from its last checkpoint.
    """

    def __init__(self, shares: Sequence[Share]):
        self.signals, self.count = 0, len(shares)
        self.processes = set[subprocess.Popen[str]]()
        self.free = SimpleQueue[Share]()
        for share in shares:
            self.free.put(share)

    def __enter__(self) -> Self:
        # those that nohup ignores stay ignored
        handled = [signum for signum in SIGNALS if signal.getsignal(signum) != signal.SIG_IGN]
        self.previous = {signum: signal.signal(signum, self._forward) for signum in handled}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)

    def run(self, command: list[str], output: IO[str] | None, errors: IO[str]) -> int:
        """Runs a command and returns its status; `output` None keeps the stdout of this process."""
        share = self.free.get()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                text=True,
                env=os.environ | share,
                process_group=0,  # so that Ctrl-C reaches it only once, through _forward
            )
            self.processes.add(process)
            if self.signals:  # received before the process existed
                process.terminate()
            status = process.wait()
            self.processes.remove(process)
            return status
        finally:
            self.free.put(share)

    def _forward(self, signum: int, frame: FrameType | None) -> None:
        self.signals += 1
        if self.free.qsize() == self.count:  # nothing is running or starting
            raise RunInterrupted("interrupted; the same command resumes")
        for process in list(self.processes):
            if self.signals == 1:
                process.terminate()
            elif process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
