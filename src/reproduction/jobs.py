"""The jobs of a sweep on this machine, some at a time, each in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import FrameType

from reproduction.compose import RunPlan, hydra_arguments
from reproduction.config import TRAIN
from reproduction.errors import PlainError, say
from reproduction.machine import CORES, usable_cores

Environment = dict[str, str]


def environments(jobs: int, devices: int) -> Iterator[Environment]:
    """Divides this machine among `jobs` runs at a time, each with `devices` processes.

    GPUs are assigned in turn, so several runs may share one; cores are divided.
    """
    from reproduction.training.ranks import visible_gpus  # imports torch

    gpus = visible_gpus()
    groups = max(1, len(gpus) // devices)
    cores = max(1, usable_cores() // jobs)
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // devices)))
    for number in range(jobs):
        first = devices * (number % groups)
        yield {
            "OMP_NUM_THREADS": threads,
            CORES: str(cores),
            "CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + devices]),
        }


def in_processes(plans: Sequence[RunPlan], jobs: int) -> Iterator[PlainError | None]:
    """Trains runs by train.py, `jobs` at a time; their output goes to OUTPUTS/.logs.

    Yields the error of each or None, and raises KeyboardInterrupt after a signal.
    """
    from reproduction.training.stop import handling  # imports torch

    jobs = min(jobs, len(plans))
    logs = plans[0].path.parent / ".logs"
    free = SimpleQueue[Environment]()
    for environment in environments(jobs, max(plan.config.devices for plan in plans)):
        free.put(environment)
    running = set[subprocess.Popen[bytes]]()
    signals = list[int]()  # received: nothing more starts

    def forward(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        for process in list(running):
            process.send_signal(signum)  # saves after its step, or ends at a second Ctrl-C

    def train_apart(plan: RunPlan) -> PlainError | None:
        path = plan.folder.path
        log_path = logs / f"{path.name}.log"
        environment = free.get()
        try:
            if signals or plan.folder.is_finished():
                return None
            say(str(path))
            with log_path.open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, TRAIN, *hydra_arguments(path), *plan.overrides],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=os.environ | environment,
                    process_group=0,  # so that Ctrl-C reaches it only once, by `forward`
                )
                running.add(process)
                if signals:  # received before the process existed
                    process.terminate()
                status = process.wait()
                running.remove(process)
        finally:
            free.put(environment)
        if status == 0 or signals:
            return None
        return PlainError(f"{path}: ended with status {status}; its output is in {log_path}")

    logs.mkdir(parents=True, exist_ok=True)
    say(f"{jobs} runs at a time, logs in {logs}")
    with handling(forward), ThreadPoolExecutor(jobs) as pool:
        errors = [*pool.map(train_apart, plans)]
    yield from errors
    if signals:
        raise KeyboardInterrupt
