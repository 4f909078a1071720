"""Trains the runs of a plan: none twice, interrupted ones from where they are, failed ones again.

At full and short scale each run has a process of its own, and so have runs that are trained at the
same time; the small runs of other scales share this one.
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

TRAIN = Path(__file__).resolve().parents[3] / "train.py"
ATTEMPTS = 2
POLL_SECONDS = 10.0

# Trains one run and says in one line what went wrong, None if nothing; RunLocked if another
# process has the run, KeyboardInterrupt if this one is to end.
Start = Callable[[PlannedRun], str | None]
SIGNALS = (*STOP_SIGNALS, signal.SIGHUP)
JOBS_WITHOUT_GPUS = 2
Share = dict[str, str]  # an environment


def prepare(runs: list[PlannedRun], settings: Settings, here: bool = True) -> None:
    """Makes stand-in images where the settings use them, and checks every run that has to train.

    Raises UserError before the first run starts, and leaves the devices of runs that will not be
    `here` unchecked. Data sets that can be are downloaded.
    """
    pending = [run for run in runs if may_train(run)]
    if settings.uses_stand_ins:
        for name in {run.config.dataset.name for run in pending} - {"digits"}:
            make_stand_ins(name, Path(str(settings.dataset_root(name))))
    for run in pending:
        if problem := missing_data(run.config.dataset.name, run.config.dataset.root):
            raise UserError(problem)
    if pending:  # else torch need not be imported
        check_all([run.config for run in pending], here)


def may_train(run: PlannedRun) -> bool:
    """Whether something is left to do, and the folder can be read: else it fails alone."""
    try:
        return not run.is_done()
    except UserError:
        return False


def train_all(
    runs: list[PlannedRun], start: Start, jobs: int = 1, poll: float = POLL_SECONDS
) -> dict[str, str]:
    """Trains what is not done; returns the last error of each run that failed, by its name.

    Starts `jobs` runs at a time, in threads if they are more than one. A failed run is tried once
    more after the others. A run that another process has is left until the others are done, and
    then waited for, looking every `poll` seconds.
    """
    attempts, failed, known = Counter[str](), dict[str, str](), set[str]()
    while runs:
        held, again = list[PlannedRun](), list[PlannedRun]()
        for run, outcome in zip(runs, _outcomes(runs, start, jobs), strict=True):
            failed.pop(run.name, None)
            if isinstance(outcome, RunLocked):
                if run.name not in known:
                    print(f"{outcome}; it is waited for in the end", flush=True)
                known.add(run.name)
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


def _outcomes(runs: list[PlannedRun], start: Start, jobs: int) -> Iterator[str | RunLocked | None]:
    """How each run has ended, in their order."""

    def outcome(run: PlannedRun) -> str | RunLocked | None:
        try:
            return None if run.is_done() else start(run)
        except RunLocked as locked:
            return locked
        except UserError as error:
            return str(error)

    if jobs == 1:
        yield from map(outcome, runs)
        return
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(outcome, runs)


def train_here(run: PlannedRun) -> str | None:
    """Trains in this process."""
    from reproduction.reporting.report import write_report
    from reproduction.training.train import run_training

    _begin(run)
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
    """As train_all, each run in a process of its own, one for each share of the machine at a time.

    `logs` is a folder for what they print.
    """
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        print(f"{len(at_once)} runs at a time, what they print is in {logs}", flush=True)
    with Children(at_once) as children:
        start = partial(train_apart, children=children, logs=logs)
        return train_all(runs, start, len(at_once))


def train_apart(run: PlannedRun, children: "Children", logs: Path | None = None) -> str | None:
    """Trains by train.py in a process of its own."""
    if children.signals:
        raise RunInterrupted("interrupted")
    _begin(run)
    log = nullcontext() if logs is None else (logs / f"{run.name}.log").open("a")
    with log as output, tempfile.TemporaryFile("w+") as errors:
        status = children.run([sys.executable, str(TRAIN), *run.overrides], output, errors)
        errors.seek(0)
        said = errors.read()
        (output or sys.stderr).write(said)
    if children.signals:
        raise RunInterrupted(f"interrupted; {run.folder.path} goes on with the same command")
    if status == 0 and run.is_done():
        return None
    _refuse_held(run)  # another process was faster
    return said.strip().splitlines()[-1] if said.strip() else _ending(status)


def _begin(run: PlannedRun) -> None:
    """Says what begins; RunLocked if another process has the run."""
    _refuse_held(run)
    begun = bool(run.folder.checkpoints())
    print(f"{'going on with' if begun else 'starting'} {run.name}", flush=True)


def _refuse_held(run: PlannedRun) -> None:
    if is_held(run.folder):
        raise RunLocked(f"{run.folder.path} is being trained by another process")


def _ending(status: int) -> str:
    if status < 0:
        return f"train.py was ended by {signal.Signals(-status).name}"
    return f"train.py ended with status {status} and left no finished run"


def shares(jobs: int | None, devices: int) -> list[Share]:
    """What each of `jobs` runs at once gets of this machine, with `devices` processes for a run.

    GPUs go round; cores are divided. None for `jobs`: as many as have GPUs of their own, 2 without.
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
    """Runs commands, in any thread, one for each of the shares at a time.

    While it is entered they get SIGTERM for the first signal that this process gets, SIGKILL for
    the second. With SIGTERM train.py ends after a step and goes on there; after SIGKILL from its
    last checkpoint.
    """

    def __init__(self, shares: Sequence[Share]):
        self.signals, self.count = 0, len(shares)
        self.processes = set[subprocess.Popen[str]]()
        self.free = SimpleQueue[Share]()
        for share in shares:
            self.free.put(share)

    def __enter__(self) -> Self:
        ours = [signum for signum in SIGNALS if signal.getsignal(signum) != signal.SIG_IGN]  # nohup
        self.before = {signum: signal.signal(signum, self._pass_on) for signum in ours}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self.before.items():
            signal.signal(signum, handler)

    def run(self, command: list[str], output: IO[str] | None, errors: IO[str]) -> int:
        """Runs the command to its end and returns its status.

        `output` takes its stdout, None leaves it here; `errors` takes its stderr.
        """
        share = self.free.get()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                text=True,
                env=os.environ | share,
                process_group=0,  # of its own, so that Ctrl-C reaches it once, through _pass_on
            )
            self.processes.add(process)
            if self.signals:  # one came before there was a process
                process.terminate()
            status = process.wait()
            self.processes.remove(process)
            return status
        finally:
            self.free.put(share)

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        self.signals += 1
        if self.free.qsize() == self.count:  # nothing runs or is being started
            raise RunInterrupted("interrupted; the same command goes on")
        for process in list(self.processes):
            if self.signals == 1:
                process.terminate()
            elif process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
