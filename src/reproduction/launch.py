"""Runs points: one after the other, some at a time in processes, one as a task, or none."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

from reproduction.check import check
from reproduction.config import TRAIN
from reproduction.start import Point
from reproduction.system import (
    CORES,
    OneLineError,
    PlainError,
    UserError,
    is_first_rank,
    say,
    usable_cores,
    warn,
)
from reproduction.words import in_quotes

Share = dict[str, str]  # of this machine: environment variables


def run_all(
    points: Sequence[Point], jobs: int | None = None, task: int | None = None
) -> list[OneLineError]:
    """Trains all points that are not finished, and returns the errors.

    All are checked before the first one starts; one that fails ends no other. `jobs` runs at a
    time have a process each and share this machine; `task` is the only one to run, as in an array
    of jobs. Ctrl-C saves what runs and ends with KeyboardInterrupt, a second one ends at once.
    """
    if task is not None and task >= len(points):
        raise UserError(f"task={task}: must be 0 to {len(points) - 1}")
    points = points if task is None else [points[task]]
    check(points)
    finished = [point.folder.is_finished() for point in points]
    outcomes = [*map(here, points)] if jobs is None else in_processes(points, jobs)
    errors = list[OneLineError]()
    for point, error, was_finished in zip(points, outcomes, finished, strict=True):
        # another process may have held the lock, and finished the run meanwhile
        is_done = not was_finished and point.folder.is_finished()
        if error is not None and not (isinstance(error, UserError) and is_done):
            errors.append(error)
    return errors


def here(point: Point) -> OneLineError | None:
    """Trains a run in this process and writes its report; returns its error."""
    from reproduction.reporting.report import write_report  # import torch
    from reproduction.training.run import run_training
    from reproduction.training.stop import ending

    say(str(point.folder.path))
    try:
        write_report(point.folder, run_training(point.config))
    except Exception as error:
        end = ending(error, point.config)
        return type(end)(str(end))  # without the traceback, which holds the model
    return None


def shares(jobs: int, devices: int) -> Iterator[Share]:
    """Divides this machine among `jobs` runs at a time, each with `devices` processes.

    GPUs are assigned in turn, so several runs may share one; cores are divided.
    """
    from reproduction.training.ranks import visible_gpus

    gpus, cores = visible_gpus(), max(1, usable_cores() // jobs)
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // devices)))
    for number in range(jobs):
        first = number % max(1, len(gpus) // devices) * devices
        visible = ",".join(gpus[first : first + devices])
        yield {"OMP_NUM_THREADS": threads, CORES: str(cores), "CUDA_VISIBLE_DEVICES": visible}


def in_processes(points: Sequence[Point], jobs: int) -> list[OneLineError | None]:
    """Trains points by train.py, `jobs` at a time; their output goes to OUTPUTS/.logs."""
    from reproduction.training.stop import handling  # imports torch

    jobs = min(jobs, len(points))
    logs = Path(points[0].config.output_root, ".logs")
    free, running, signals = SimpleQueue[Share](), set[subprocess.Popen[bytes]](), list[int]()
    for share in shares(jobs, max(point.config.devices for point in points)):
        free.put(share)

    def forward(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        for process in list(running):
            process.send_signal(signum)  # saves after its step, or ends at a second Ctrl-C

    def start(point: Point) -> OneLineError | None:
        share, path = free.get(), logs / f"{point.folder.path.name}.log"
        name = in_quotes(point.folder.path.name)
        try:
            if signals or point.folder.is_finished():
                return None
            say(str(point.folder.path))
            with path.open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, TRAIN, *point.words, f"name={name}"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=os.environ | share,
                    process_group=0,  # so that Ctrl-C reaches it only once, by `forward`
                )
                running.add(process)
                if signals:  # received before the process existed
                    process.terminate()
                status = process.wait()
                running.remove(process)
        finally:
            free.put(share)
        if status == 0 or signals:
            return None
        if status < 0:
            return PlainError(f"{point.folder.path}: ended by {signal.Signals(-status).name}")
        last = [f"{path} is empty", *path.read_text(errors="replace").splitlines()][-1]
        kind = UserError if status == 2 else PlainError
        return kind(last.removeprefix(f"{TRAIN.name}: "))

    logs.mkdir(parents=True, exist_ok=True)
    say(f"{jobs} runs at a time, logs in {logs}")
    with handling(forward), ThreadPoolExecutor(jobs) as pool:
        outcomes = [*pool.map(start, points)]
    if signals:
        raise KeyboardInterrupt("interrupted; repeat the command with resume=auto to continue")
    return outcomes


def end(program: str, failed: list[OneLineError]) -> int:
    """Prints the errors of runs and returns the exit status of the program."""
    for error in failed if is_first_rank() else ():
        warn(f"{program}: {error}")
    return max((2 if isinstance(x, UserError) else 1 for x in failed), default=0)
