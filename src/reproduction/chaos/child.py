"""train.py without its pictures, which notes what it does: child FILE [train.py's arguments]."""

import os
import runpy
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from reproduction.chaos.notes import Notes, notes_of
from reproduction.config import CONF_DIR
from reproduction.reporting import report
from reproduction.training.loop import Trainer

TRAIN = CONF_DIR.parent / "train.py"
PARTS = {
    "_train_batches": "loading",
    "_flush": "log line",
    "_end_epoch": "evaluation",
    "_save": "checkpoint",
}


def main() -> None:
    notes = notes_of(Path(sys.argv[1]), int(os.environ.get("RANK", "0")))
    notes.write()
    for name, phase in PARTS.items():
        setattr(Trainer, name, _noting(notes, phase, getattr(Trainer, name)))
    setattr(Trainer, "train_step", _counting(notes, Trainer.train_step))
    setattr(report, "write_report", _noting(notes, "report", report.write_report))
    setattr(report, "_draw", lambda folder: {})  # which takes longer than such a run
    sys.argv = [str(TRAIN), *sys.argv[2:]]
    runpy.run_path(str(TRAIN), run_name="__main__")


def _noting(notes: Notes, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        before = notes.read().phase
        notes.write(phase=phase)
        try:
            return function(*args, **kwargs)
        finally:
            notes.write(phase=before)

    return noted


def _counting(notes: Notes, step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def counted(self: Trainer, *args: Any) -> Any:
        notes.write(phase="step")
        parts = step(self, *args)
        notes.write(self.step + 1, phase="loading")
        return parts

    return counted


if __name__ == "__main__":
    main()
