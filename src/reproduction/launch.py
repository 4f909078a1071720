"""Runs points: one after the other, some at a time in processes, one as a task, or none."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from reproduction.check import check
from reproduction.config import FORBID, TRAIN, Count, Whole, line_of
from reproduction.start import Point, same_files
from reproduction.system import (
    CORES,
    OneLineError,
    PlainError,
    UserError,
    say,
    usable_cores,
    warn,
    write_text,
)
from reproduction.words import in_quotes

Share = dict[str, str]  # of this machine: environment variables


@checked(config=FORBID, frozen=True, kw_only=True)
class Launch:
    """How points are run: `jobs` at a time, only `task`, or listed; and what they are chosen by."""

    jobs: Count | None
    task: Whole | None
    dry_run: bool
    objective: Literal["val_top1", "val_top5", "val_loss"]

    def refuse(self, *names: str, reason: str) -> None:
        """Raises UserError for each of these that is set."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value is not False:
                raise UserError(f"{name}={value}: {reason}")


def launch_of(tree: Any, **settings: Any) -> Launch:
    """Returns what a tree says of it, unless `settings` do. UserError for another value."""
    values = {key: settings.get(key, tree[key]) for key in Launch.__annotations__}
    try:
        return Launch(**values)
    except ValidationError as error:
        raise UserError("; ".join(line_of(x) for x in error.errors())) from None


def run_all(points: Sequence[Point], jobs: int | None = None) -> list[OneLineError | None]:
    """Trains all points that are not finished, and returns the error of each, or None.

    All are checked before the first one starts; one that fails ends no other. `jobs` runs at a
    time have a process each and share this machine. Ctrl-C saves what runs and ends with
    KeyboardInterrupt, a second one ends at once.
    """
    check(points)
    finished = [point.folder.is_finished() for point in points]
    outcomes = [*map(here, points)] if jobs is None else in_processes(points, jobs)
    errors = list[OneLineError | None]()
    for point, error, was_finished in zip(points, outcomes, finished, strict=True):
        # another process may have held the lock, and finished the run meanwhile
        is_done = not was_finished and point.folder.is_finished()
        errors.append(None if isinstance(error, UserError) and is_done else error)
    return errors


def here(point: Point) -> OneLineError | None:
    """Trains a run in this process and writes its report; returns its error."""
    from reproduction.reporting.report import write_report  # import torch
    from reproduction.training.run import run_training
    from reproduction.training.stop import ending

    say(str(point.folder.path))
    try:
        write_report(point.folder, run_training(point.config, origin(point)))
    except Exception as error:
        return ending(error, point.config)
    return None


def origin(point: Point) -> dict[str, Any]:
    """Returns how a run can be typed again."""
    command = ["python", "train.py", *same_files(), *point.typed]
    return {"overrides": point.typed, "command": shlex.join(command)}


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
                    [sys.executable, TRAIN, *same_files(), *point.typed, f"name={name}"],
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
        raise KeyboardInterrupt
    return outcomes


def end(program: str, failed: Sequence[OneLineError]) -> int:
    """Prints the errors of runs and returns the exit status of the program."""
    for error in failed:
        warn(f"{program}: {error}")
    return max((2 if isinstance(x, UserError) else 1 for x in failed), default=0)


# --- sweeps -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """The folder of a sweep, where its points and their errors are noted until it ends.

    A sweeper of ours notes all points before, any other one lets each job note its own.
    """

    path: Path

    @contextmanager
    def planned(self, points: Sequence[Point]) -> Iterator[None]:
        """Notes all points; takes the note back if the sweep does not come to its end."""
        for number, point in enumerate(points):
            self.note(number, point)
        try:
            yield
        except BaseException:
            self.take()
            raise

    def note(self, number: int, point: Point, error: OneLineError | None = None) -> None:
        path = self.path / f"point-{number:06}.json"
        self.path.mkdir(parents=True, exist_ok=True)
        content = {"point": asdict(point), "error": None}
        if path.exists():
            content = json.loads(path.read_text())
        if error is not None:
            content["error"] = {"text": str(error), "is_mistake": isinstance(error, UserError)}
        write_text(path, json.dumps(content))

    def take(self) -> tuple[list[Point], list[OneLineError]]:
        """Returns the points in their order, and the errors, and removes the notes."""
        points, errors = [], list[OneLineError]()
        for path in sorted(self.path.glob("point-*.json")):
            content = json.loads(path.read_text())
            points.append(TypeAdapter(Point).validate_python(content["point"]))
            error = content["error"]
            if error is not None:
                kind = UserError if error["is_mistake"] else PlainError
                errors.append(kind(error["text"]))
            path.unlink()
        with suppress(OSError):  # a launcher's logs are kept, and folders that hold runs
            self.path.rmdir()
            self.path.parent.rmdir()
            self.path.parent.parent.rmdir()
        return points, errors


def going_on(points: Sequence[Point], interrupt: str) -> str:
    """Returns the line that ends an interrupted sweep: how to go on."""
    is_resumed = all(point.config.resume == "auto" for point in points)
    how = "" if is_resumed else " with resume=auto"
    return interrupt or f"interrupted; repeat the command{how} to continue"


def objective(point: Point, name: str) -> float | None:
    """Returns what a sweeper chooses by, of the last epoch of a run; None without such a number."""
    log = point.folder.read_summary().get("log") or [{}]
    return log[-1].get(name)


GRIDS = ("hydra_plugins.checked.", "hydra._internal.core_plugins.basic_sweeper.")


def check_choice(points: Sequence[Point], sweeper: str) -> None:
    """Raises UserError if a sweeper that chooses settings would choose them on the test set."""
    from reproduction.data.sources import opened  # imports torch

    for point in points if not sweeper.startswith(GRIDS) else ():
        if opened(point.config.dataset).validation is None:
            reason = "chooses settings, and so needs a validation split: dataset.validation=0.1"
            raise UserError(f"hydra.sweeper={sweeper}: {reason}")
