"""Runs of seconds, as processes that can be killed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reproduction.chaos.notes import Notes, notes_of
from reproduction.runs import RunFolder

SMALL = (
    *("augmentation=[mixup,cutmix,htm,vtm]", "augmentation.htm.tau=2.4", "augmentation.htm.rho=0"),
    *("model.embed_dim=16", "dataset.limit=80", "recipe.batch_size=10", "recipe.epochs=12"),
    *("recipe.transforms.erasing_prob=0.5", "recipe.log_every=2", "device=cpu"),
)
CHILD = "reproduction.chaos.child"
PATIENCE = 300.0  # seconds for a start and some steps on a machine that others use as well


@dataclass
class Outcome:
    """What a part has done, with `rows` for a table, and what was not as it should be."""

    part: str
    counts: Mapping[str, object]
    differences: list[str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Place:
    """Where the runs of a part are, and apart from them what they say and what is noted of them."""

    root: Path
    logs: Path

    def folder(self, name: str) -> RunFolder:
        return RunFolder(self.root / name)

    def clear(self) -> None:
        for path in (self.root, self.logs):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)

    def notes(self, name: str, rank: int = 0) -> Notes:
        return notes_of(self.logs / f"{name}.notes", rank)

    def errors(self, name: str) -> str:
        return (self.logs / f"{name}.err").read_text()

    @contextmanager
    def started(
        self, name: str, *args: str, launcher: tuple[str, ...] = ()
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A run at work in a session of its own, of which nothing is left in the end."""
        where = (f"name={name}", f"output_root={self.root}", "resume=auto")
        notes = str(self.logs / f"{name}.notes")
        command = [sys.executable, *launcher, "-m", CHILD, notes, *where, *SMALL, *args]
        with (self.logs / f"{name}.err").open("w") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        try:
            yield process
        finally:
            kill_group(process)

    def run(self, name: str, *args: str, launcher: tuple[str, ...] = ()) -> int:
        """The status of a run that nobody disturbs."""
        with self.started(name, *args, launcher=launcher) as process:
            return process.wait(PATIENCE)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for the process and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for_step(process: subprocess.Popen[bytes], notes: Notes, step: int, phase: str) -> bool:
    """Waits until the run has done `step` and is in `phase`; False if it ends before.

    TimeoutError after PATIENCE seconds.
    """
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None:
        note = notes.read()
        if note.step >= step and note.phase == phase:
            return True
        if time.monotonic() > deadline:
            raise TimeoutError(f"step {step} does not come, the run is at {note}")
        time.sleep(0.0005)
    return False
