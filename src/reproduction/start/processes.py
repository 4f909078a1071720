"""Runs scripts in processes of their own, some at a time, each with its share of the machine."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import IO, Self, TypeVar

from reproduction.system.errors import STOP_SIGNALS, RunInterrupted
from reproduction.system.hardware import CORES, usable_cores
from reproduction.system.terminal import say

Item = TypeVar("Item")
Result = TypeVar("Result")

Share = dict[str, str]  # of this machine: environment variables


def shares(jobs: int, devices: int) -> list[Share]:
    """Divides this machine among `jobs` runs at a time, each with `devices` processes.

    GPUs are assigned in turn, so several runs may share one; cores are divided, and so are the
    loaders' workers of `dataset.workers=auto`.
    """
    from reproduction.training.ranks import visible_gpus

    gpus = visible_gpus()
    cores = max(1, usable_cores() // jobs)
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // devices)))
    environment = {"OMP_NUM_THREADS": threads, CORES: str(cores)}
    if not gpus:
        return [environment] * jobs
    groups = max(1, len(gpus) // devices)
    firsts = [number % groups * devices for number in range(jobs)]
    visible = [",".join(gpus[first : first + devices]) for first in firsts]
    return [environment | {"CUDA_VISIBLE_DEVICES": gpu} for gpu in visible]


class Processes:
    """Runs scripts from any thread, one at a time for each of the shares.

    As a context manager it forwards signals: SIGTERM for the first one that this process receives,
    SIGKILL for the second. On SIGTERM a run stops after a step and can be resumed there; after
    SIGKILL it resumes from its last checkpoint. `logs` is a folder for the scripts' output.
    """

    def __init__(self, shares: Sequence[Share], logs: Path | None = None):
        self.signals, self.logs, self.count = 0, logs, len(shares)
        self.running = set[subprocess.Popen[str]]()
        self.free = SimpleQueue[Share]()
        for share in shares:
            self.free.put(share)

    def __enter__(self) -> Self:
        # those that nohup ignores stay ignored
        handled = [x for x in STOP_SIGNALS if signal.getsignal(x) != signal.SIG_IGN]
        self.previous = {signum: signal.signal(signum, self._forward) for signum in handled}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Returns the function's results; as many threads call it as there are shares."""
        with ThreadPoolExecutor(self.count) as pool:
            return [*pool.map(function, items)]

    def check(self) -> None:
        """Raises RunInterrupted if this process has received a signal."""
        if self.signals:
            raise RunInterrupted("interrupted")

    def run(self, name: str, script: Path, words: Sequence[str]) -> tuple[int, str]:
        """Runs a script; returns its status and the last line that it printed to stderr.

        Raises the error of `check`, also after it.
        """
        share = self.free.get()
        try:
            self.check()
            log: AbstractContextManager[IO[str] | None] = nullcontext()
            if self.logs is not None:
                self.logs.mkdir(parents=True, exist_ok=True)
                log = (self.logs / f"{name}.log").open("a")
            with log as output, tempfile.TemporaryFile("w+") as errors:
                process = subprocess.Popen(
                    [sys.executable, str(script), *words],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    text=True,
                    env=os.environ | share,
                    process_group=0,  # so that Ctrl-C reaches it only once, through _forward
                )
                self.running.add(process)
                if self.signals:  # received before the process existed
                    process.terminate()
                status = process.wait()
                self.running.remove(process)
                errors.seek(0)
                stderr = errors.read()
                (output or sys.stderr).write(stderr)
        finally:
            self.free.put(share)
        self.check()
        if stderr.strip():
            return status, stderr.strip().splitlines()[-1].removeprefix(f"{script.name}: ")
        if status < 0:
            return status, f"{script.name} was ended by {signal.Signals(-status).name}"
        return status, f"{script.name} ended with status {status}"

    def _forward(self, signum: int, frame: FrameType | None) -> None:
        self.signals += 1
        if self.signals == 1:
            say("stopping all runs after their steps (a second signal: at once)")
        for process in list(self.running):
            if self.signals == 1:
                process.terminate()
            elif process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
