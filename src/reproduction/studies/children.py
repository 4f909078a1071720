"""Processes that train for this one: they hear its signals, and share its GPUs and cores."""

import os
import signal
import subprocess
from collections.abc import Sequence
from queue import SimpleQueue
from types import FrameType
from typing import IO, Self

from reproduction.commands.launchers import gpu_share
from reproduction.system.errors import STOP_SIGNALS, RunInterrupted
from reproduction.system.hardware import usable_cores

SIGNALS = (*STOP_SIGNALS, signal.SIGHUP)
JOBS_WITHOUT_GPUS = 2
Share = dict[str, str]  # an environment


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
        self.signals = 0
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
            return self._run(command, share, output, errors)
        finally:
            self.free.put(share)

    def _run(
        self, command: list[str], share: Share, output: IO[str] | None, errors: IO[str]
    ) -> int:
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

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        self.signals += 1
        if not self.processes:
            raise RunInterrupted("interrupted; the same command goes on")
        for process in list(self.processes):
            if self.signals == 1:
                process.terminate()
            elif process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
