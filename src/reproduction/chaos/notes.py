"""What a training process is doing right now, in a file that outlives it."""

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

PHASES = ("start-up", "loading", "step", "log line", "evaluation", "checkpoint", "report")
LAYOUT = struct.Struct("<IIB")


class Note(NamedTuple):
    """`step`: the last whole one, of this process or of one before it."""

    step: int
    process: int
    phase: str


class Notes:
    """Written by one process and read by another through memory that they share."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            if file.tell() < LAYOUT.size:
                file.truncate(LAYOUT.size)
            self.memory = mmap.mmap(file.fileno(), LAYOUT.size)

    def read(self) -> Note:
        step, process, phase = LAYOUT.unpack(self.memory)
        return Note(step, process, PHASES[phase])

    def write(self, step: int | None = None, phase: str = "start-up") -> None:
        """Keeps the step if none is given."""
        step = self.read().step if step is None else step
        LAYOUT.pack_into(self.memory, 0, step, os.getpid(), PHASES.index(phase))


def notes_of(path: Path, rank: int = 0) -> Notes:
    """The notes of one rank."""
    return Notes(path.with_name(f"{path.name}.{rank}"))
