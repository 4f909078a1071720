"""Trains the runs of a plan: none twice, interrupted ones from where they are, failed ones again.

At full and short scale each run has a process of its own; the small runs of others share this one.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO

from reproduction.data.folders import missing_data
from reproduction.data.stand_ins import make_stand_ins
from reproduction.errors import (
    STOP_SIGNALS,
    RunFailed,
    RunInterrupted,
    RunLocked,
    UserError,
    first_line,
)
from reproduction.jobs import check_all, main
from reproduction.locking import is_held
from reproduction.plan import PlannedRun, Settings

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
ATTEMPTS = 2
POLL_SECONDS = 10.0
SIGNALS = (*STOP_SIGNALS, signal.SIGHUP)

# Trains one run and says in one line what went wrong, None if nothing; RunLocked if another
# process has the run, KeyboardInterrupt if this one is to end.
Start = Callable[[PlannedRun], str | None]


def prepare(runs: list[PlannedRun], settings: Settings) -> None:
    """Makes stand-in images where the settings use them, and checks every run that has to train.

    Raises UserError before the first run starts. Data sets that can be are downloaded.
    """
    pending = [run for run in runs if not run.is_done()]
    if settings.uses_stand_ins:
        for name in {run.config.dataset.name for run in pending} - {"digits"}:
            make_stand_ins(name, Path(str(settings.dataset_root(name))))
    for run in pending:
        if problem := missing_data(run.config.dataset.name, run.config.dataset.root):
            raise UserError(problem)
    if pending:  # else torch need not be imported
        check_all([run.config for run in pending])


def train_all(runs: list[PlannedRun], start: Start, poll: float = POLL_SECONDS) -> dict[str, str]:
    """Trains what is not done; returns the last error of each run that failed, by its name.

    A failed run is tried once more after the others. A run that another process has is left until
    the others are done, and then waited for, looking every `poll` seconds.
    """
    queue, held = deque(runs), deque[PlannedRun]()
    attempts, failed, known = Counter[str](), dict[str, str](), set[str]()
    while queue or held:
        if not queue:
            time.sleep(poll)
            queue, held = held, queue
        run = queue.popleft()
        try:
            error = None if run.is_done() else start(run)
        except RunLocked as locked:
            if run.name not in known:
                print(f"{locked}; it is waited for in the end", flush=True)
            known.add(run.name)
            held.append(run)
            continue
        failed.pop(run.name, None)
        if error is not None:
            failed[run.name] = error
            attempts[run.name] += 1
            if attempts[run.name] < ATTEMPTS:
                queue.append(run)
    return failed


def train_here(run: PlannedRun) -> str | None:
    """Trains in this process."""
    _begin(run)
    try:
        main(run.config)
    except RunLocked:
        raise
    except (UserError, RunFailed) as error:
        print(error, file=sys.stderr)
        return str(error)
    except Exception as error:
        traceback.print_exc()
        return first_line(error)
    return None


def train_apart(run: PlannedRun) -> str | None:
    """Trains by train.py in a process of its own."""
    _begin(run)
    child = Child()
    with tempfile.TemporaryFile("w+") as errors:
        status = child.run([sys.executable, str(TRAIN), *run.overrides], errors)
        errors.seek(0)
        said = errors.read()
    sys.stderr.write(said)
    if child.signals:
        raise RunInterrupted(f"interrupted; {run.folder.path} goes on with the same command")
    if status == 0 and run.is_done():
        return None
    _refuse_held(run)  # another process was faster
    return said.strip().splitlines()[-1] if said.strip() else _ending(status)


class Child:
    """A process that gets SIGTERM for the first signal that this one gets, SIGKILL for the second.

    With SIGTERM train.py ends after a step and goes on there; after SIGKILL from its last epoch.
    """

    def __init__(self) -> None:
        self.signals = 0
        self.process: subprocess.Popen[str] | None = None

    def run(self, command: list[str], errors: IO[str]) -> int:
        """Runs the command to its end and returns its status; `errors` takes its stderr."""
        ours = [signum for signum in SIGNALS if signal.getsignal(signum) != signal.SIG_IGN]  # nohup
        before = {signum: signal.signal(signum, self._pass_on) for signum in ours}
        try:
            # in a group of its own, so that Ctrl-C reaches it once, through _pass_on
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stderr=errors, text=True, process_group=0
            )
            if self.signals:  # one came before there was a process
                self.process.terminate()
            return self.process.wait()
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        self.signals += 1
        if self.process is None:
            return
        if self.signals == 1:
            self.process.terminate()
        elif self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


def _begin(run: PlannedRun) -> None:
    """Says what begins; RunLocked if another process has the run."""
    _refuse_held(run)
    begun = run.folder.last_path.exists()
    print(f"{'going on with' if begun else 'starting'} {run.name}", flush=True)


def _refuse_held(run: PlannedRun) -> None:
    if is_held(run.folder):
        raise RunLocked(f"{run.folder.path} is being trained by another process")


def _ending(status: int) -> str:
    if status < 0:
        return f"train.py was ended by {signal.Signals(-status).name}"
    return f"train.py ended with status {status} and left no finished run"
