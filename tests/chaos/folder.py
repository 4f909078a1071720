"""A run's folder: on a disk that is full, and wanted by several processes at the same time."""

import os
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from reproduction.runs import locking
from reproduction.runs.folder import RunFolder
from reproduction.runs.locking import hold, is_held
from reproduction.system.errors import RunLocked, UserError
from tests.chaos.runs import PATIENCE, Outcome, Place, differences, last_state, wait_for_step

FULL_AFTER = 20  # steps
PATIENCES = (0.5, 0.0)  # of the processes, in turn: to come one after the other, or be refused


class Disk(Protocol):
    name: str

    def fill(self, process: int) -> None: ...
    def free(self) -> None: ...


class SmallDisk:
    """A file system in memory, filled up by a file."""

    name = "tmpfs of 4 MiB"

    def __init__(self, root: Path):
        self.ballast = root / "ballast"

    def fill(self, process: int) -> None:
        with self.ballast.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def free(self) -> None:
        self.ballast.unlink()


class FileLimit:
    """Where nothing can be mounted: the system lets the process write no file beyond 64 KiB.

    Its checkpoints are larger, its lines and what it says are not.
    """

    name = "limit of file sizes"

    def fill(self, process: int) -> None:
        resource.prlimit(process, resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))

    def free(self) -> None:
        """The next process has no limit."""


@contextmanager
def small_disk(root: Path) -> Iterator[Disk]:
    """A disk at `root`, or its stand-in where mounting is not permitted."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(root)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        yield FileLimit()
        return
    try:
        yield SmallDisk(root)
    finally:
        subprocess.run(["umount", str(root)], check=True)


def fill_disk(place: Place) -> Outcome:
    """Fills the disk under a run, looks at what is left, frees it and lets the run go on."""
    args, name = ("checkpoint.every_steps=3", "recipe.epochs=6"), "full"
    whole = replace(place, root=place.root.with_name("disk-whole"))
    whole.clear()
    found = whole.finish("whole", *args)
    with small_disk(place.root) as disk:
        with place.started(name, *args) as process:
            wait_for_step(process, place.notes(name), FULL_AFTER, "loading")
            disk.fill(process.pid)
            status = process.wait(PATIENCE)
        said = place.errors(name).splitlines()
        found += _left(place, name, status, said)
        disk.free()
        found += place.finish(name, *args) or differences(place.folder(name), whole.folder("whole"))
    line = said[-1].replace(str(place.root), "...") if said else "nothing"
    counts = {"runs": 1, "disk": disk.name, "said": line}
    return Outcome("full disk", counts, found)


def _left(place: Place, name: str, status: int, said: list[str]) -> Iterator[str]:
    """What a full disk must leave: status 1, one line and a checkpoint that loads."""
    if status != 1 or len(said) != 1:
        yield f"full disk: status {status}, {len(said)} lines: {said[-1:]}"
    try:
        last_state(place.folder(name))
    except UserError as error:
        yield f"full disk: {error}"


def contend(root: Path, processes: int, rounds: int) -> Outcome:
    """All start in the same moment, again and again; at most one may be in the folder."""
    root.mkdir(parents=True, exist_ok=True)
    context = get_context("fork")
    barrier, told = context.Barrier(processes), context.SimpleQueue()
    workers = [
        context.Process(target=_want, args=(root, number, rounds, barrier, told))
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    rows: list[dict[str, int]] = []
    while len(rows) < processes and any(worker.is_alive() for worker in workers):
        if told.empty():
            time.sleep(0.05)
        else:
            rows.append(told.get())
    for worker in workers:
        worker.join()
    while not told.empty():
        rows.append(told.get())
    statuses = [worker.exitcode for worker in workers]
    total = {key: sum(row[key] for row in rows) for key in ("held", "refused", "together")}
    found = [f"{total['together']} times two at once"] if total["together"] else []
    found += [f"{processes - len(rows)} processes told nothing"] if len(rows) < processes else []
    found += [f"processes ended with status {statuses}"] if any(statuses) else []
    return Outcome("lock", {"starts": processes * rounds, **total}, found)


def _want(root: Path, number: int, rounds: int, barrier: Barrier, told: Any) -> None:
    """Holds the folder for a moment; every second time a run begins there, else nothing is left."""
    rng = np.random.default_rng(number)
    locking.PATIENCE = PATIENCES[number % len(PATIENCES)]
    counts = {"held": 0, "refused": 0, "together": 0}
    for turn in range(rounds):
        folder = RunFolder(root / f"run-{turn % 3}")
        barrier.wait(60)
        is_held(folder)
        try:
            with hold(folder):
                counts["held"] += 1
                counts["together"] += _meets_another(root, rng.uniform(0, 0.003))
                folder.config_path.unlink(missing_ok=True)
                if turn % 2:
                    folder.config_path.touch()
        except RunLocked:
            counts["refused"] += 1
    told.put(counts)


def _meets_another(root: Path, seconds: float) -> bool:
    """Whether another process is in the folder within these seconds."""
    inside = root / "inside"
    try:
        os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return True
    time.sleep(seconds)
    inside.unlink(missing_ok=True)
    return False
