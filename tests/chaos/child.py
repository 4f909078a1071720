"""Runs train.py without figures and records its progress: child FILE [train.py arguments]."""

import mmap
import os
import runpy
import struct
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

from reproduction.config import CONF_DIR
from reproduction.reporting import report
from reproduction.training import operations
from reproduction.training.loop import Trainer

TRAIN = CONF_DIR.parent / "train.py"
PHASES = ("start-up", "loading", "step", "log line", "evaluation", "checkpoint", "report")
PHASE_OF: dict[tuple[Any, str], str] = {  # where a function is looked up, its name -> phase
    (Trainer, "_begin_epoch"): "loading",
    (Trainer, "_flush"): "log line",
    (Trainer, "_end_epoch"): "evaluation",
    (operations, "save"): "checkpoint",
    (report, "write_report"): "report",
}
LAYOUT = struct.Struct("<IIB")


class Note(NamedTuple):
    """`step` is the last completed one, of this process or an earlier one."""

    step: int
    process: int
    phase: str


class Notes:
    """The progress of a process, written to shared memory and read by another process."""

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
        """Keeps the recorded step if `step` is None."""
        step = self.read().step if step is None else step
        LAYOUT.pack_into(self.memory, 0, step, os.getpid(), PHASES.index(phase))


def notes_of(path: Path, rank: int = 0) -> Notes:
    """Returns the notes of one rank."""
    return Notes(path.with_name(f"{path.name}.{rank}"))


def main() -> None:
    notes = notes_of(Path(sys.argv[1]), int(os.environ.get("RANK", "0")))
    notes.write()
    for (owner, name), phase in PHASE_OF.items():
        setattr(owner, name, _noting(notes, phase, getattr(owner, name)))
    setattr(Trainer, "train_step", _counting(notes, Trainer.train_step))
    setattr(report, "_draw", lambda folder, config: [])  # drawing takes longer than these runs
    sys.argv = [str(TRAIN), *sys.argv[2:]]
    runpy.run_path(str(TRAIN), run_name="__main__")


def _noting(notes: Notes, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before = notes.read().phase
        notes.write(phase=phase)
        try:
            return function(*args, **kwargs)
        finally:
            notes.write(phase=before)

    return wrapper


def _counting(notes: Notes, step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def wrapper(self: Trainer, *args: Any) -> Any:
        notes.write(phase="step")
        parts = step(self, *args)
        notes.write(self.step + 1, phase="loading")
        return parts

    return wrapper


if __name__ == "__main__":
    main()
