"""Trains the runs of a plan, one after the other or some at a time.

Finished runs are skipped, interrupted ones resumed, and runs that another process trains left
alone: a second start of the command trains what is left.
"""

import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import IO, NoReturn, Self

from reproduction.commands.jobs import check_all
from reproduction.config import TRAIN
from reproduction.data.folders import missing_data
from reproduction.data.stand_ins import make_stand_ins
from reproduction.runs.locking import is_held
from reproduction.studies.plan import PlannedRun
from reproduction.studies.study import Settings
from reproduction.system.errors import (
    STOP_SIGNALS,
    PlainError,
    RunInterrupted,
    RunLocked,
    UserError,
    first_line,
)
from reproduction.system.hardware import usable_cores

# Trains a run, announced after a text such as `run 2 of 12: `; returns the error or None.
# Raises RunLocked if another process trains it, and KeyboardInterrupt if this process is to stop.
Start = Callable[[PlannedRun, str], str | None]
SIGNALS = (*STOP_SIGNALS, signal.SIGHUP)
MOST_WORKERS = 16  # of a loader, as in training


def prepare(runs: Sequence[PlannedRun], settings: Settings) -> None:
    """Makes stand-in images if the settings use them, and checks all runs that are to be trained.

    Downloads data sets where possible. Raises UserError before the first run starts.
    """
    pending = [run for run in runs if _may_train(run)]
    if settings.uses_stand_ins:
        for name in {run.config.dataset.name for run in pending} - {"digits"}:
            make_stand_ins(name, Path(str(settings.dataset_root(name))))
    for run in pending:
        if problem := missing_data(run.config.dataset.name, run.config.dataset.root):
            raise UserError(problem)
    if pending:  # avoids importing torch otherwise
        check_all([run.config for run in pending])


def _may_train(run: PlannedRun) -> bool:
    """Whether the run is not done and its folder is readable; otherwise it fails on its own."""
    try:
        return not run.is_done()
    except UserError:
        return False


def train_all(runs: Sequence[PlannedRun], start: Start, jobs: int = 1) -> dict[str, str]:
    """Trains all runs that are not done, `jobs` at a time in threads; returns errors by run."""
    total = len(runs)

    def outcome(numbered: tuple[int, PlannedRun]) -> str | None:
        number, run = numbered
        try:
            place = f"run {number} of {total}: " if total > 1 else ""
            return None if run.is_done() else start(run, place)
        except RunLocked as locked:
            print(f"{locked}; left to it", flush=True)
            return None
        except UserError as error:
            return str(error)

    if jobs == 1:
        outcomes = [*map(outcome, enumerate(runs, 1))]
    else:
        with ThreadPoolExecutor(jobs) as pool:
            outcomes = [*pool.map(outcome, enumerate(runs, 1))]
    return {x.name: error for x, error in zip(runs, outcomes, strict=True) if error is not None}


def train_here(run: PlannedRun, place: str) -> str | None:
    """Trains a run in this process, for small runs."""
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


@dataclass(frozen=True)
class Share:
    """A part of this machine: environment variables, and workers of a loader (None: its own)."""

    environment: dict[str, str]
    workers: int | None = None


def train_all_apart(
    runs: Sequence[PlannedRun], shares: Sequence[Share] = (Share({}),), logs: Path | None = None
) -> dict[str, str]:
    """Like train_all, with a process for each run; each share of the machine has one at a time.

    `logs` is a folder for their output.
    """
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        print(f"{len(shares)} runs at a time, logs in {logs}", flush=True)
    with Children(shares) as children:
        return train_all(runs, partial(_train_apart, children, logs), len(shares))


def _train_apart(
    children: "Children", logs: Path | None, run: PlannedRun, place: str
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


def shares(jobs: int, devices: int) -> list[Share]:
    """Divides this machine among `jobs` runs at a time, each with `devices` processes.

    GPUs are assigned in turn, so several runs may share one; cores and the loaders' workers are
    divided.
    """
    from reproduction.training.distributed import visible_gpus

    gpus = visible_gpus()
    cores = max(1, usable_cores() // (jobs * devices))
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cores))}
    workers = min(MOST_WORKERS, cores) if jobs > 1 else None
    if not gpus:
        return [Share(environment, workers)] * jobs
    visible = (gpu_share(gpus, number, devices) for number in range(jobs))
    return [Share(environment | {"CUDA_VISIBLE_DEVICES": gpu}, workers) for gpu in visible]


def gpu_share(gpus: list[str], number: int, devices: int) -> str:
    """Returns CUDA_VISIBLE_DEVICES for run `number`: `devices` GPUs, assigned round-robin."""
    first = number % max(1, len(gpus) // devices) * devices
    return ",".join(gpus[first : first + devices])


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
        """Runs train.py and returns its status; `output` None keeps the stdout of this process."""
        share = self.free.get()
        sets_workers = any(word.startswith("dataset.workers=") for word in command)
        if share.workers is not None and not sets_workers:
            command = [*command, f"dataset.workers={share.workers}"]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                text=True,
                env=os.environ | share.environment,
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


def train_task(runs: Sequence[PlannedRun], number: int, device: str) -> NoReturn:
    """Becomes train.py for run `number` of the plan, as a task of a job array does."""
    if not 0 <= number < len(runs):
        raise UserError(f"task={number}: the plan has {len(runs)} runs, 0 to {len(runs) - 1}")
    if runs[number].is_done():
        print(f"{runs[number].name} is finished", flush=True)
        sys.exit(0)
    command = [sys.executable, str(TRAIN), *runs[number].overrides, f"device={device}"]
    os.execv(sys.executable, command)  # noqa: S606 - without a shell
