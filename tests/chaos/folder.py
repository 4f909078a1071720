"""Run folders on a full disk, and under contention between processes."""

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
PATIENCES = (0.5, 0.0)  # alternating between processes: wait for the lock, or be refused


class Disk(Protocol):
    name: str

    def fill(self, process: int) -> None: ...
    def free(self) -> None: ...


class SmallDisk:
    """An in-memory file system, filled by one file."""

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
    """A file size limit of 64 KiB, for systems where mounting is not permitted.

    Checkpoints are larger than that, metrics and messages are not.
    """

    name = "limit of file sizes"

    def fill(self, process: int) -> None:
        resource.prlimit(process, resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))

    def free(self) -> None:
        """Does nothing: the limit ends with the process."""


@contextmanager
def small_disk(root: Path) -> Iterator[Disk]:
    """Mounts a small disk at `root`, or yields its stand-in if mounting is not permitted."""
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
    """Fills the disk under a run, checks the folder, frees the disk and resumes the run."""
    args, name = ("checkpoint.every_minutes=1e-6", "recipe.epochs=6"), "full"
    undisturbed = replace(place, root=place.root.with_name("disk-whole"))
    undisturbed.clear()
    failures = undisturbed.finish("whole", *args)
    with small_disk(place.root) as disk:
        with place.started(name, *args) as process:
            wait_for_step(process, place.notes(name), FULL_AFTER, "loading")
            disk.fill(process.pid)
            status = process.wait(PATIENCE)
        errors = place.errors(name).splitlines()
        failures += _check_left(place, name, status, errors)
        disk.free()
        failures += place.finish(name, *args) or differences(
            place.folder(name), undisturbed.folder("whole")
        )
    line = errors[-1].replace(str(place.root), "...") if errors else "nothing"
    counts = {"runs": 1, "disk": disk.name, "said": line}
    return Outcome("full disk", counts, failures)


def _check_left(place: Place, name: str, status: int, errors: list[str]) -> Iterator[str]:
    """Yields violations: a full disk must leave status 1, one line and a loadable checkpoint."""
    if status != 1 or len(errors) != 1:
        yield f"full disk: status {status}, {len(errors)} lines: {errors[-1:]}"
    try:
        last_state(place.folder(name))
    except UserError as error:
        yield f"full disk: {error}"


def contend(root: Path, processes: int, rounds: int) -> Outcome:
    """Starts all processes at the same moment, repeatedly; at most one may hold the folder."""
    root.mkdir(parents=True, exist_ok=True)
    context = get_context("fork")
    barrier, results = context.Barrier(processes), context.SimpleQueue()
    workers = [
        context.Process(target=_acquire, args=(root, number, rounds, barrier, results))
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    rows: list[dict[str, int]] = []
    while len(rows) < processes and any(worker.is_alive() for worker in workers):
        if results.empty():
            time.sleep(0.05)
        else:
            rows.append(results.get())
    for worker in workers:
        worker.join()
    while not results.empty():
        rows.append(results.get())
    statuses = [worker.exitcode for worker in workers]
    total = {key: sum(row[key] for row in rows) for key in ("held", "refused", "together")}
    failures = [f"{total['together']} times two at once"] if total["together"] else []
    failures += [f"{processes - len(rows)} processes are silent"] if len(rows) < processes else []
    failures += [f"processes ended with status {statuses}"] if any(statuses) else []
    return Outcome("lock", {"starts": processes * rounds, **total}, failures)


def _acquire(root: Path, number: int, rounds: int, barrier: Barrier, results: Any) -> None:
    """Holds the folder for a moment per round; leaves the beginning of a run every second time."""
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
    results.put(counts)


def _meets_another(root: Path, seconds: float) -> bool:
    """Returns whether another process enters the folder within `seconds`."""
    inside = root / "inside"
    try:
        os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return True
    time.sleep(seconds)
    inside.unlink(missing_ok=True)
    return False
