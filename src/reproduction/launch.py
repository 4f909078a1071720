"""Runs points, one after the other or some at a time, and notes for the end how each one ended."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

from reproduction.check import check
from reproduction.config import TRAIN, validated
from reproduction.points import Point, flags_of_files
from reproduction.system import (
    CORES,
    OneLineError,
    PlainError,
    UserError,
    say,
    usable_cores,
    write_text,
)
from reproduction.words import in_quotes

Environment = dict[str, str]
# sweepers that try every value and choose none: they need no validation split
GRIDS = ("hydra_plugins.checked.", "hydra._internal.core_plugins.basic_sweeper.")


def run_all(points: Sequence[Point], jobs: int | None = None) -> list[OneLineError | None]:
    """Trains all points that are not finished, and returns the error of each, or None.

    All are checked before the first one starts; one that fails ends no other. `jobs` runs at a
    time have a process each and share this machine. Ctrl-C saves what runs and ends with
    KeyboardInterrupt, a second one ends at once.
    """
    check(points)
    were_finished = [point.folder.is_finished() for point in points]
    errors = [*map(train_here, points)] if jobs is None else in_processes(points, jobs)
    for number, point in enumerate(points):
        # another process may have held the lock, and finished the run meanwhile
        is_done_now = not were_finished[number] and point.folder.is_finished()
        if is_done_now and isinstance(errors[number], UserError):
            errors[number] = None
    return errors


def train_here(point: Point) -> OneLineError | None:
    """Trains a run in this process, unless it is finished, and writes its report."""
    from reproduction.reporting.report import write_report  # imports torch
    from reproduction.training.run import run_training
    from reproduction.training.stop import ending

    say(str(point.folder.path))
    command = shlex.join(["python", "train.py", *flags_of_files(), *point.words])
    try:
        origin = {"overrides": point.words, "command": command}
        write_report(point.folder, run_training(point.config, origin))
    except Exception as error:
        return ending(error, point.config)
    return None


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


def in_processes(points: Sequence[Point], jobs: int) -> list[OneLineError | None]:
    """Trains points by train.py, `jobs` at a time; their output goes to OUTPUTS/.logs."""
    from reproduction.training.stop import handling  # imports torch

    jobs = min(jobs, len(points))
    logs = Path(points[0].config.output_root, ".logs")
    free = SimpleQueue[Environment]()
    for environment in environments(jobs, max(point.config.devices for point in points)):
        free.put(environment)
    running = set[subprocess.Popen[bytes]]()
    signals = list[int]()  # received: nothing more starts

    def forward(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        for process in list(running):
            process.send_signal(signum)  # saves after its step, or ends at a second Ctrl-C

    def train_apart(point: Point) -> OneLineError | None:
        path = point.folder.path
        log_path = logs / f"{path.name}.log"
        environment = free.get()
        try:
            if signals or point.folder.is_finished():
                return None
            say(str(path))
            # found here already: the other process must not choose a folder anew
            name = f"name={in_quotes(path.name)}"
            with log_path.open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, TRAIN, *flags_of_files(), *point.words, name],
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
        if status < 0:
            return PlainError(f"{path}: ended by {signal.Signals(-status).name}")
        # the last line that train.py prints is its error
        lines = log_path.read_text(errors="replace").splitlines() or [f"{log_path} is empty"]
        line = lines[-1].removeprefix(f"{TRAIN.name}: ")
        return UserError(line) if status == UserError.status else PlainError(line)

    logs.mkdir(parents=True, exist_ok=True)
    say(f"{jobs} runs at a time, logs in {logs}")
    with handling(forward), ThreadPoolExecutor(jobs) as pool:
        errors = [*pool.map(train_apart, points)]
    if signals:
        raise KeyboardInterrupt
    return errors


# --- sweeps -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Notes:
    """The folder of a sweep, where its points and their errors are noted until it ends.

    PointSweeper notes all points before they run, with the rows that they are of. For any other
    sweeper CheckedLauncher notes them after they have run, or each job its own (`train_job`),
    without rows.
    """

    path: Path

    def add(self, number: int, point: Point) -> None:
        self._write(f"point-{number:06}", asdict(point))

    def add_error(self, number: int, error: OneLineError) -> None:
        self._write(f"error-{number:06}", (str(error), error.status))

    def _write(self, name: str, content: Any) -> None:
        path = self.path / f"{name}.json"
        self.path.mkdir(parents=True, exist_ok=True)
        if not path.exists():  # the first note of a point has its rows
            write_text(path, json.dumps(content))

    def take(self) -> tuple[list[Point], list[tuple[str, int]]]:
        """Returns the points in order, and line and status of each error; removes the notes."""
        points = [validated(Point, content) for content in self._taken("point")]
        errors = self._taken("error")
        with suppress(OSError):  # a launcher's logs are kept, and folders that hold runs
            for folder in (self.path, *self.path.parents[:2]):  # a sweep, .sweeps, OUTPUTS
                folder.rmdir()
        return points, errors

    def _taken(self, kind: str) -> list[Any]:
        contents = []
        for path in sorted(self.path.glob(f"{kind}-*.json")):
            contents.append(json.loads(path.read_text()))
            path.unlink()
        return contents


def objective(point: Point, name: str) -> float | None:
    """Returns what a sweeper chooses by, of the last epoch of a run; None without such a number."""
    log = point.folder.read_summary().get("log")
    if not log:
        return None
    return log[-1].get(name)


def check_choice(points: Sequence[Point], sweeper: str) -> None:
    """Raises UserError if a sweeper that chooses settings would choose them on the test set."""
    from reproduction.data.sources import opened  # imports torch

    if sweeper.startswith(GRIDS):
        return
    for point in points:
        if opened(point.config.dataset).validation is None:
            reason = "chooses settings, and so needs a validation split: dataset.validation=0.1"
            raise UserError(f"hydra.sweeper={sweeper}: {reason}")
