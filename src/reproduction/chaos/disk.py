"""A disk that is full while a run trains."""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from reproduction.chaos.compare import differences, last_state
from reproduction.chaos.runs import PATIENCE, Outcome, Place, wait_for_step
from reproduction.errors import UserError

FULL_AFTER = 20  # steps


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
    found = [f"whole: status {status}"] if (status := whole.run("whole", *args)) else []
    with small_disk(place.root) as disk:
        with place.started(name, *args) as process:
            wait_for_step(process, place.notes(name), FULL_AFTER, "loading")
            disk.fill(process.pid)
            status = process.wait(PATIENCE)
        said = place.errors(name).splitlines()
        found += _left(place, name, status, said)
        disk.free()
        if status := place.run(name, *args):
            found.append(f"after space was freed: status {status}: {place.errors(name)[-300:]}")
        else:
            found += differences(place.folder(name), whole.folder("whole"))
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
