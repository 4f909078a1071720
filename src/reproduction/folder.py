"""The folder of a run, and the lock on it that one process at a time holds.

config.yaml       configuration, of its latest start
metrics.jsonl     one line per training step and one per evaluated epoch
summary.json      status (running, finished, interrupted, failed), data, result, accuracies by epoch
report.md         the result of a finished run, with pictures (.svg, .png)
evaluation-*      what eval.py has written
.lock             held by the training process; names it, and the job that trains or will train this
checkpoints/      last.pt and older ones to resume from, best.safetensors for evaluation

A checkpoint holds configuration and summary as well, and counts where a loss of power has damaged
the files beside it. The summary has the hash of the run: a config.yaml that was edited is refused.
"""

import fcntl
import json
import os
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import yaml
from filelock import FileLock, Timeout

from reproduction.cluster import is_restarted, job_id
from reproduction.config import Config
from reproduction.errors import OneLineError, UserError, of_system, warn
from reproduction.files import flush, naming, write_text
from reproduction.identity import changes, former_hash, run_hash, saved
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

    @classmethod
    def of(cls, config: Config) -> "RunFolder":
        assert config.name is not None, "compose.point_of() sets the name"
        return cls(Path(config.output_root, config.name))

    # What is here

    def is_run(self) -> bool:
        """Whether this is a run, or may be one: a folder that may not be read."""
        for path in (self.config_path, self.last_path, self.previous_path):
            try:
                path.stat()
            except PermissionError:
                return True
            except OSError:
                continue
            return True
        return False

    def check(self, config: Config) -> None:
        """Raises UserError if this folder cannot be used for this run, or could not be read."""
        if not is_first_rank():
            return  # the first rank may already have created it for the others
        if saved(asdict(config)) != config:
            rule = "no empty mapping, and no key that is a number or has a dot"
            raise UserError(f"options of code of your own: must hold {rule}: none is read back")
        place = next(x for x in self.path.absolute().parents if os.path.lexists(x))
        if not place.is_dir():
            raise UserError(f"output_root={config.output_root}: {place} is no folder")
        if not self.is_taken():
            return
        if config.resume != "auto":
            advice = "resume it with resume=auto or choose another name"
            raise UserError(f"name={config.name}: {self.path} exists; {advice}")
        others = changes(config, self.read_config())
        if others:
            reason = f"{self.path} holds another run, this one has {others}"
            raise UserError(f"name={config.name}: {reason}")

    def is_taken(self) -> bool:
        """Whether this path holds a run, or files that are not ours.

        An empty folder is free, as is one with a lock alone: its process was killed early.
        """
        if not os.path.lexists(self.path):
            return False
        if self.lock_path.exists():
            return self.is_run()
        return not self.path.is_dir() or any(self.path.iterdir())

    def check_same(self, entry: Literal["data", "code"], now: Mapping[str, str]) -> None:
        """Raises UserError if the run has begun on other data, or by other code, than `now`."""
        if not (self.is_finished() or self.checkpoints()):
            return  # nothing was learnt from them
        then = self.read_summary().get(entry) or {}
        others = [
            f"{then[name]} then, {now[name]} now"
            for name in then
            if name in now and now[name] != then[name]
        ]
        if others:
            reason = f"{self.path} was trained with other {entry}: {', '.join(others)}"
            advice = "choose another output_root, or move that folder away"
            raise UserError(f"name={self.path.name}: {reason}; {advice}")

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
        with _named(self.lock_path), self.lock_path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def holder(self) -> str:
        """Returns which process trains this run, or was the last to."""
        return self._lock_text().strip().replace("\n", ", ") or "another process"

    def job(self) -> str | None:
        """Returns the job of a cluster to which this run was given last, if any."""
        _, _, job = self._lock_text().partition(OF_A_JOB)
        return job.strip() or None

    def _lock_text(self) -> str:
        if not os.path.lexists(self.lock_path):
            return ""
        with _named(self.lock_path):
            return self.lock_path.read_text()

    def give_to(self, job: str) -> None:
        """Records the job that was submitted to train this run."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock_path.write_text(f"{OF_A_JOB}{job}\n")

    def checkpoints(self) -> list[Path]:
        """Returns the checkpoints to resume from, newest first."""
        return [path for path in (self.last_path, self.previous_path) if path.exists()]

    def weights(self, which: str) -> list[Path]:
        """Returns the files to read `last` or `best` weights from, the first readable one counts.

        Raises UserError if there are none.
        """
        files = {"last": self.checkpoints()}
        if self.best_path.exists():
            files["best"] = [self.best_path]
        if not files.get(which):
            held = " or ".join(name for name in files if files[name])
            reason = f"must be {held}" if held else "there are none yet"
            raise UserError(f"run={self.path} weights={which}: {reason}")
        return files[which]

    # Reading

    def read_config(self) -> Config:
        """Returns the configuration, of a checkpoint if the file is damaged.

        Raises UserError if this is not a run folder, or its file is not what has been trained.
        """
        try:
            with _named(self.config_path):
                raw = _whole_yaml(self.config_path.read_text())
        except UserError as error:
            raw = self._rescued("config", error)
            if not raw:
                raise
        with _named(self.config_path):  # saved() refuses a setting that is gone
            config = saved(raw)
        trained = None  # what earlier revisions recorded
        if self.summary_path.exists():
            trained = self.read_summary().get("run_hash")
        if trained not in (None, run_hash(config), former_hash(config)):
            reason = f"its run is {run_hash(config)}, and summary.json is of {trained}"
            raise UserError(f"{self.config_path}: was changed: {reason}")
        return config

    def read_summary(self) -> dict[str, Any]:
        """Returns the summary, of a checkpoint if the file is damaged; empty if there is none."""
        if not (self.summary_path.exists() or self.checkpoints()):
            return {}
        try:
            with _named(self.summary_path):
                return summary_of_today(json.loads(self.summary_path.read_text()))
        except UserError as error:
            if self.best_path.exists() and not self.checkpoints():
                raise  # the run may be finished, and so must not begin again
            return summary_of_today(self._rescued("summary", error))

    def _rescued(self, entry: str, error: UserError) -> dict[str, Any]:
        """Returns what the newest checkpoint holds of a damaged file, empty if nothing.

        Raises the `error` of a file that is perhaps not damaged, but cannot be read now.
        """
        cause = error.__cause__
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            raise error
        paths = self.checkpoints()
        if not paths:
            return {}
        held = _in_checkpoint(tuple(paths), paths[0].stat().st_mtime_ns)
        if entry in held:
            _warn_once(f"{error}; a checkpoint holds the {entry}")
        elif entry == "summary":
            _warn_once(f"{error}; no checkpoint holds the summary")
        return held.get(entry, {})

    def read_metrics(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns (step lines, epoch lines) of metrics.jsonl."""
        if not self.metrics_path.exists():
            return [], []
        with _named(self.metrics_path):
            text, _, _ = self.metrics_path.read_text().rpartition("\n")  # drops a truncated line
            lines = [line_of_today(json.loads(line)) for line in text.splitlines()]
        return [x for x in lines if "step" in x], [x for x in lines if "step" not in x]

    def metrics_size(self) -> int:
        return self.metrics_path.stat().st_size if self.metrics_path.exists() else 0

    # Writing, by the process that holds the lock

    def begin(self, config: Config, checkpoint: Path | None, metrics_size: int) -> None:
        """Creates the folder, or takes it back to a checkpoint: the newest that is not damaged.

        `metrics_size` are the bytes of metrics.jsonl that the checkpoint has recorded.
        """
        self.last_path.parent.mkdir(parents=True, exist_ok=True)
        flush(self.path.parent)
        content = yaml.safe_dump(asdict(config), sort_keys=False)
        write_text(self.config_path, f"{YAML_BEGIN}{content}{YAML_END}")
        self.metrics_path.touch()
        os.truncate(self.metrics_path, self._usable_metrics(metrics_size))
        flush(self.metrics_path)
        if checkpoint is not None:
            os.replace(checkpoint, self.last_path)
            flush(self.last_path.parent)

    def _usable_metrics(self, recorded: int) -> int:
        """Returns the bytes of whole lines among the recorded ones; warns if some are lost."""
        with self.metrics_path.open("rb") as file:
            lines = file.read(recorded).splitlines(keepends=True)
        size = sum(map(len, takewhile(_is_whole, lines)))
        if size < recorded:
            lost = f"{recorded - size:,} of {recorded:,} bytes are lost"
            _warn_once(f"{self.metrics_path}: {lost}; the weights and the results are not")
        return size

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
        return self.metrics_size()

    def keep_last(self) -> None:
        """Keeps last.pt as the previous checkpoint too, which stays until another replaces it."""
        if not self.last_path.exists():
            return
        self.previous_path.unlink(missing_ok=True)
        try:
            os.link(self.last_path, self.previous_path)
        except OSError:  # a file system without hard links: for a moment there is only this one
            os.replace(self.last_path, self.previous_path)

    def remove_left_over(self) -> None:
        """Removes the temporary files of processes that are gone.

        Who wrote a checkpoint, the configuration or the summary held the lock, which is ours now;
        so that process is gone, on whatever machine. Other files are written without the lock, and
        what a killed process leaves of one stays.
        """
        for path in (self.last_path, self.best_path, self.config_path, self.summary_path):
            for temporary in path.parent.glob(f".{path.name}.*tmp"):
                temporary.unlink(missing_ok=True)


# What the summary of an earlier revision has of the latest start alone.
OF_A_START = ("git_revision", "versions", "hardware", "threads")


def line_of_today(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a line of metrics, of any revision, by the names of this one.

    Earlier ones called easy samples mixed ones, and did not count those with a replaced token.
    """
    if "easy_samples" in line:
        return {**line}
    found = {name: x for name, x in line.items() if not name.startswith("mixed_")}
    for name in line.keys() - found.keys():
        found[f"easy_{name.removeprefix('mixed_')}"] = line[name]
    return found


def summary_of_today(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the summary, or published line, of any revision by the names of this one.

    `starts` has an entry for each start of the run: its `step`, revision, versions and machine.
    """
    found = line_of_today(summary)
    if "git_revision" in summary:
        start = {name: found.pop(name, None) for name in OF_A_START}
        found["starts"] = [{"step": 0, **start}]
    return found


YAML_BEGIN = "---\n"
YAML_END = "...\n"  # a file that was cut short has the beginning, and not the end


def _whole_yaml(text: str) -> dict[str, Any]:
    """Reads a mapping. ValueError for a text that is cut short.

    The files of earlier revisions have neither beginning nor end.
    """
    if text.startswith(YAML_BEGIN) and not text.endswith(YAML_END):
        raise ValueError("is cut short")
    content = yaml.safe_load(text)
    if not isinstance(content, dict):
        raise ValueError("holds no configuration")
    return content


def _is_whole(line: bytes) -> bool:
    """Whether a line is one that `append_metrics` has written."""
    try:
        json.loads(line)
    except ValueError:
        return False
    return line.endswith(b"\n")


@lru_cache(maxsize=16)
def _in_checkpoint(checkpoints: tuple[Path, ...], mtime: int) -> dict[str, Any]:
    """Returns the `config` and `summary` of the newest readable checkpoint, if it holds them.

    `mtime`, of the newest, is for the cache alone: what has changed is read anew.
    """
    from reproduction.models.weights import read_newest  # imports torch

    _, content = read_newest([*checkpoints])
    return {entry: content[entry] for entry in ("config", "summary") if entry in content}


@lru_cache
def _warn_once(text: str) -> None:
    """Warns once in a process, by its first rank."""
    if is_first_rank():
        warn(f"warning: {text}")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Names the file that cannot be read or does not hold what it should, in a OneLineError."""
    try:
        with naming(path):
            yield
    except OSError as error:
        raise of_system(error) from error
    except Exception as error:  # of YAML and JSON, of the schema
        raise UserError(f"{path}: {error}") from error


def find(config: Config) -> list[RunFolder]:
    """Returns the folders of output_root that hold this run, the one to go on with first.

    A folder that cannot be read is left out: train.py reports it if it is named.
    """
    root = Path(config.output_root)
    mtime = root.stat().st_mtime_ns if root.is_dir() else 0
    return sorted(_runs(root, mtime)[run_hash(config)], key=_progress, reverse=True)


def _progress(folder: RunFolder) -> tuple[bool, int, bool]:
    """How far a run is: finished, then with the most metrics, then the original of a copy.

    The summary of a copy has the name of its original. A damaged run is behind the others.
    """
    try:
        summary = folder.read_summary()
    except OneLineError:
        return False, 0, False
    is_original = summary.get("name") == folder.path.name
    return summary.get("status") == "finished", folder.metrics_size(), is_original


@lru_cache(maxsize=1)
def _runs(root: Path, mtime: int) -> defaultdict[str, list[RunFolder]]:
    """Returns the runs in a folder by their hash; read once for all points of a sweep.

    `mtime`, of the folder, is for the cache alone: with another folder in it, it is read anew.
    """
    runs = defaultdict[str, list[RunFolder]](list)
    for folder in map(RunFolder, sorted(root.glob("*"))):
        with suppress(UserError):
            if folder.is_run():
                runs[run_hash(folder.read_config())].append(folder)
    return runs


# --- lock ---------------------------------------------------------------------------------------

OF_A_JOB = "job "  # before its id, in a line of the lock
PATIENCE = 0.5  # seconds: a reader may hold the lock briefly, or its owner may be exiting
PATIENCE_AT_RESTART = 60.0  # of torchrun or of a job: what ran before may still shut down


@contextmanager
def hold(folder: RunFolder) -> Iterator[None]:
    """Locks the run for this process, on the first rank only. UserError if it is taken.

    The system frees the lock when the process ends. A run that is refused leaves no folder.
    """
    if not is_first_rank():
        yield
        return
    path = folder.lock_path
    lock = FileLock(path, poll_interval=0.02, fallback_to_soft=False)
    job = job_id()
    text = f"process {os.getpid()} on {socket.gethostname()}\n"
    if job is not None:
        text += f"{OF_A_JOB}{job}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(PATIENCE_AT_RESTART if launched_ranks() or is_restarted() else PATIENCE)
        path.write_text(text)
    except Timeout:
        taken = f"name={folder.path.name}: {folder.holder()} is training {folder.path}"
        if job is not None and folder.job() == job:
            taken += "; a run is one task of a job, in which devices=N starts N processes"
        raise UserError(taken) from None
    except OSError as error:
        raise of_system(error, f"output_root={folder.path.parent}") from error
    try:
        folder.remove_left_over()
        yield
    finally:
        with suppress(OSError):  # the folder is gone, or the one above holds other runs
            holds_only_the_lock = [*folder.path.iterdir()] == [path]
            if holds_only_the_lock:  # beside other files, it says that the folder is ours
                path.unlink()
                folder.path.rmdir()
                folder.path.parent.rmdir()
        lock.release()
