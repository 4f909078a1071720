"""The folder of a run, and the lock on it that one process at a time holds.

config.yaml       configuration, of its latest start
metrics.jsonl     one line per training step and one per evaluated epoch
summary.json      status (running, finished, interrupted, failed), data, result, accuracies by epoch
report.md         the result of a finished run, with pictures (.svg, .png)
evaluation-*      what eval.py has written
.lock             held by the training process; names it
checkpoints/      last.pt and older ones to resume from, best.safetensors for evaluation

Each file but metrics.jsonl is replaced as a whole, and of that one a checkpoint counts the bytes.
The summary has the hash of the run: a config.yaml that was edited is refused.
"""

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from reproduction.config import Config, validated
from reproduction.errors import UserError
from reproduction.files import flush, naming, write_text
from reproduction.identity import changes, run_hash
from reproduction.machine import is_first_rank, launched_ranks


class RunFolder:
    """Reads and writes one run folder."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.lock_path = self.path / ".lock"
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.summary_path = self.path / "summary.json"
        self.report_path = self.path / "report.md"
        self.last_path = self.path / "checkpoints" / "last.pt"
        self.previous_path = self.path / "checkpoints" / "last-1.pt"
        self.best_path = self.path / "checkpoints" / "best.safetensors"

    # What is here

    def is_run(self) -> bool:
        """Whether this is the folder of a run."""
        return any(map(os.path.lexists, (self.config_path, self.last_path, self.previous_path)))

    def check(self, config: Config) -> None:
        """Raises UserError if this folder cannot be used for this run."""
        if not is_first_rank():
            return  # the first rank may already have created it for the others
        name = f"name={self.path.name}"
        if not self.is_run():
            if self.path.exists() and not self.lock_path.exists():  # else a run has tried to begin
                for path in self.path.iterdir():
                    if path.name != ".hydra" and path.suffix != ".log":  # of Hydra
                        raise UserError(f"{name}: {path} is in the way; choose another name")
            return
        if config.resume != "auto":
            advice = "resume it with resume=auto or choose another name"
            raise UserError(f"{name}: {self.path} exists; {advice}")
        others = changes(config, self.read_config())
        if others:
            raise UserError(f"{name}: {self.path} holds another run, this one has {others}")

    def is_finished(self) -> bool:
        """Whether the run is finished and has its result."""
        return self.read_summary().get("status") == "finished"

    def status(self) -> str:
        """Returns finished, running, failed, interrupted (also if it was killed) or not started.

        The lock's owner must not call this.
        """
        status = self.read_summary().get("status")
        if status == "finished":
            return "finished"
        if self.is_locked():
            return "running"
        if status == "failed":
            return "failed"
        return "interrupted"

    def is_locked(self) -> bool:
        """Whether a process trains this run. To ask, it is enough that the lock can be read."""
        if not os.path.lexists(self.lock_path):
            return False
        with self.lock_path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def checkpoints(self) -> list[Path]:
        """Returns the checkpoints to resume from, newest first."""
        return [path for path in (self.last_path, self.previous_path) if path.exists()]

    def weights(self, which: str) -> list[Path]:
        """Returns the files to read `last` or `best` weights from, the first readable one counts.

        Raises UserError if there are none.
        """
        files = {"last": self.checkpoints(), "best": [self.best_path]}
        found = [path for path in files.get(which, []) if path.exists()]
        if not found:
            raise UserError(f"run={self.path} weights={which}: it has none; allowed are last, best")
        return found

    # Reading

    def read_config(self) -> Config:
        """Returns the configuration; UserError if it is none, or not what was trained."""
        with _named(self.config_path):
            config = validated(Config, yaml.safe_load(self.config_path.read_text()))
        trained = self.read_summary().get("run_hash")
        if trained not in (None, run_hash(config)):
            reason = f"its run is {run_hash(config)}, and summary.json is of {trained}"
            raise UserError(f"{self.config_path}: was changed: {reason}")
        return config

    def read_summary(self) -> dict[str, Any]:
        """Returns the summary, empty if no run has begun here."""
        if not self.summary_path.exists():
            return {}
        with _named(self.summary_path):
            return json.loads(self.summary_path.read_text())

    def read_metrics(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns (step lines, epoch lines) of metrics.jsonl."""
        if not self.metrics_path.exists():
            return [], []
        with _named(self.metrics_path):
            text, _, _ = self.metrics_path.read_text().rpartition("\n")  # drops a truncated line
            lines = [json.loads(line) for line in text.splitlines()]
        return [x for x in lines if "step" in x], [x for x in lines if "step" not in x]

    # Writing, by the process that holds the lock

    def begin(self, config: Config, checkpoint: Path | None, metrics_size: int) -> None:
        """Creates the folder, or takes it back to a checkpoint: the newest that is not damaged.

        `metrics_size` are the bytes of metrics.jsonl that the checkpoint has recorded.
        """
        self.last_path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.config_path, yaml.safe_dump(asdict(config), sort_keys=False))
        self.metrics_path.touch()
        os.truncate(self.metrics_path, min(metrics_size, self.metrics_path.stat().st_size))
        if checkpoint is not None:
            os.replace(checkpoint, self.last_path)

    def write_summary(self, **entries: Any) -> dict[str, Any]:
        """Adds entries to the summary and returns the result."""
        summary = self.read_summary() | entries
        write_text(self.summary_path, json.dumps(summary, indent=2) + "\n")
        return summary

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Appends a line; a part that a full disk leaves of it is cut off on a resume."""
        with naming(self.metrics_path), self.metrics_path.open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def flush_metrics(self) -> int:
        """Waits until metrics.jsonl is on the disk, and returns its size."""
        flush(self.metrics_path)
        return self.metrics_path.stat().st_size

    def keep_last(self) -> None:
        """Keeps last.pt as the previous checkpoint too, which stays until another replaces it."""
        if not self.last_path.exists():
            return
        self.previous_path.unlink(missing_ok=True)
        try:
            os.link(self.last_path, self.previous_path)
        except OSError:  # a file system without hard links: for a moment there is only this one
            os.replace(self.last_path, self.previous_path)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Names the file that does not hold what it should, in a UserError."""
    try:
        yield
    except OSError:  # names its file
        raise
    except Exception as error:  # of YAML and JSON, of the schema
        raise UserError(f"{path}: {error}") from error


# --- lock ---------------------------------------------------------------------------------------

PATIENCE = 0.5  # seconds: a reader may hold the lock briefly, or its owner may be exiting
PATIENCE_AT_RESTART = 60.0  # of torchrun or of a job: what ran before may still shut down


@contextmanager
def hold(folder: RunFolder) -> Iterator[None]:
    """Locks the run for this process, on the first rank only. UserError if it is taken.

    The system frees the lock when the process ends.
    """
    if not is_first_rank():
        yield
        return
    path = folder.lock_path
    lock = FileLock(path, poll_interval=0.02, fallback_to_soft=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_restart = launched_ranks() or "SLURM_RESTART_COUNT" in os.environ
        lock.acquire(PATIENCE_AT_RESTART if is_restart else PATIENCE)
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    except Timeout:
        holder = path.read_text() or "another process"
        raise UserError(f"name={folder.path.name}: {holder} is training {folder.path}") from None
    try:
        yield
    finally:
        lock.release()
