"""Support for Hydra's launchers: plugin and resume checks, GPUs and signals of parallel runs."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout

from reproduction.system.errors import STOP_SIGNALS, RunInterrupted, Stopped, UserError
from reproduction.system.terminal import LABEL

HERE = "basic"  # Hydra's default: one point after the other, in this process
PARALLEL = ("parallel", "joblib")  # processes on this machine
SUBMITIT = ("slurm", "submitit_slurm", "submitit_local")  # jobs that may be restarted
REQUIREMENTS = "requirements-cluster.txt"


def check_launcher(launcher: str, is_sweep: bool) -> None:
    """Raises UserError if the launcher is unknown, not installed or used without a sweep."""
    if not is_sweep:
        raise UserError(f"hydra/launcher={launcher}: needs a sweep, add -m")
    if launcher == HERE:
        return
    known = dict.fromkeys(PARALLEL, "joblib") | dict.fromkeys(SUBMITIT, "submitit")
    if launcher not in known:
        raise UserError(
            f"hydra/launcher={launcher}: must be one of {', '.join((HERE, *PARALLEL, *SUBMITIT))}"
        )
    if not _has_plugin(f"hydra_{known[launcher]}_launcher"):
        raise UserError(
            f"hydra/launcher={launcher}: needs hydra-{known[launcher]}-launcher, "
            f"pip install -r {REQUIREMENTS}"
        )


def _has_plugin(name: str) -> bool:
    try:
        return find_spec(f"hydra_plugins.{name}") is not None
    except ModuleNotFoundError:  # hydra_plugins itself is missing
        return False


def check_resume(launcher: str, resume: str) -> None:
    """Raises UserError if the launcher restarts runs but `resume` does not let them resume."""
    if launcher in SUBMITIT and resume != "auto":
        raise UserError(
            f"resume={resume}: must be auto for hydra/launcher={launcher}, which restarts "
            "interrupted runs"
        )


class Parallel:
    """The processes of a parallel sweep, which share `gpus`, `devices` for each, and stop together.

    `folder` holds the locks of their slots, their process ids and, in the end, `stopped`.
    """

    def __init__(self, folder: Path, gpus: list[str], devices: int):
        self.folder, self.gpus, self.devices = folder, gpus, devices
        self.stopped = folder / "stopped"
        self.is_stopping = False  # here; a process that Ctrl-C reached itself may be first to stop

    @contextmanager
    def starting(self) -> Iterator[None]:
        """For the starting process: a first signal stops all runs after their step, a second now.

        New processes inherit that signals are blocked, so that Ctrl-C reaches them only through
        `_stop`. Here they are blocked too, but for a thread that does nothing else.
        """
        from reproduction.training.endings import handling

        resource_tracker.ensure_running()  # its start would unblock signals
        ended = threading.Event()
        threading.Thread(target=ended.wait, daemon=True).start()
        with handling(self._stop):
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
                ended.set()
                shutil.rmtree(self.folder)
                os.environ.pop(LABEL, None)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        if self.is_stopping:
            raise Stopped(signum)  # the launcher kills its processes
        self.is_stopping = True
        self.stopped.touch()
        for process in self.folder.glob("[0-9]*"):
            with suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGTERM)

    @contextmanager
    def training(self, name: str, slots: int) -> Iterator[None]:
        """For a process that trains: takes GPUs, labels its lines and lets signals through."""
        from reproduction.training.endings import handling, stop_at_once

        os.environ[LABEL] = name
        if self.gpus:
            number, _ = _hold_slot(self.folder, slots)
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu_share(self.gpus, number, self.devices)
        self.folder.joinpath(str(os.getpid())).touch()
        if self.stopped.exists():
            raise RunInterrupted("interrupted")
        with handling(stop_at_once):
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
                yield
            except KeyboardInterrupt:
                self.stopped.touch()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


@cache
def _hold_slot(folder: Path, slots: int) -> tuple[int, FileLock]:
    """Returns the number of a slot that this process has locked, and the lock, which it keeps.

    Waits for one: a launcher may replace a process while the old one still holds its GPUs.
    """
    while True:
        for number in range(slots):
            with suppress(Timeout):
                lock = FileLock(folder / f"slot{number}", blocking=False)
                lock.acquire()
                return number, lock
        time.sleep(0.1)


def gpu_share(gpus: list[str], number: int, devices: int) -> str:
    """Returns CUDA_VISIBLE_DEVICES for run `number`: `devices` GPUs, assigned round-robin."""
    first = number % max(1, len(gpus) // devices) * devices
    return ",".join(gpus[first : first + devices])
