"""A run: its folder, its identity, and the lock that one process at a time holds.

config.yaml       configuration, of its latest start
metrics.jsonl     one line per training step and one per evaluated epoch
summary.json      status (running, finished, interrupted, failed), data, result, accuracies by epoch
.lock             held by the training process
checkpoints/      last.pt and older ones to resume from, best.safetensors for evaluation

A checkpoint holds configuration and summary as well, and counts where a loss of power has damaged
the files beside it.
"""

import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from reproduction.config import SOURCES, Config, parse
from reproduction.system import (
    UserError,
    flush,
    is_first_rank,
    is_left_over,
    launched_ranks,
    reason_of,
    warn,
    write_text,
)

# --- identity -----------------------------------------------------------------------------------

# Keys that do not change a result, and so not the identity of a run.
NOT_RESULT = (
    "name",
    "output_root",
    "resume",
    "device",
    "compile",
    "checkpoint",
    "logger",
    "dataset.workers",
    "model.checkpoint_blocks",
    "recipe.log_every",
)
FIXED = ("digits", "cifar10", "cifar100", "imagenet1k")  # data sets whose images are known
PATHS = ("dataset.root", "model.weights")  # count as typed: a project may be moved


class Gone(list[Any]):
    """A key that the schema has no more: its values (any, if none is named) that still hold."""


# What saved configurations mean: keys that are gone, and first defaults of keys that have another.
UPGRADES: dict[str, Any] = {
    "recipe.non_finite": Gone(["fail"]),
    "augmentation.htm.non_finite": Gone(["fail"]),
    "augmentation.mode": Gone(["batch"]),
    "augmentation.cutmix.labels": Gone(["area"]),
    "dataset.broken_images": Gone(["refuse"]),
    "dataset.content": Gone(),
    "model.drop": Gone([0.0]),
    "recipe.momentum": Gone([0.9]),
    "recipe.tf32": Gone([False]),
    "recipe.transforms.erasing_count": Gone([1]),
    "recipe.transforms.ratio": Gone([[0.75, 1.3333], [1.0, 1.0]]),
    "augmentation.htm.tau": 2.0,
    "augmentation.htm.rho": 0.005,
    "recipe.log_every": 50,  # which published lines leave out
}


def saved(raw: Mapping[str, Any]) -> Config:
    """Returns a saved configuration of any revision as the present schema understands it.

    Raises ValueError for a setting that the present code does not have any more.
    """
    values = dict(flat(raw))
    for key, value in UPGRADES.items():
        group = key.rpartition(".")[0]
        if not isinstance(value, Gone):
            if any(name.startswith(f"{group}.") for name in values):
                values.setdefault(key, value)
        elif key in values and (found := values.pop(key)) not in (value or [found]):
            raise ValueError(f"{key}={found}: was a setting of an earlier revision, and is gone")
    if values.get("dataset.source") is None:  # once named for own data alone
        values["dataset.source"] = f"{SOURCES}:{values['dataset.name']}"
    return parse(nested(values))


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, leaf) of nested mappings."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `flat`."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *groups, name = key.split(".")
        reduce(lambda group, part: group.setdefault(part, {}), groups, tree)[name] = value
    return tree


def changes_result(key: str) -> bool:
    """Whether a dotted key may distinguish runs."""
    return not any(f"{key}.".startswith(f"{name}.") for name in NOT_RESULT)


def settings(config: Config) -> dict[str, Any]:
    """Returns the dotted keys and values that determine a result: the identity of a run.

    The folder of a fixed data set is not among them, as its images may be moved.
    """
    is_fixed = config.dataset.name in FIXED
    found = {}
    for name, value in flat(asdict(config)):
        if not changes_result(name) or (is_fixed and name == "dataset.root"):
            continue
        found[name] = value
        if name in PATHS and value is not None:
            found[name] = os.path.normpath(value)  # `data/x/` is `data/x`
    return found


def evaluated(config: Config) -> dict[str, Any]:
    """Returns the settings that the result of evaluating weights depends on."""
    parts = ("model.", "dataset.", "recipe.precision")
    return {name: value for name, value in settings(config).items() if name.startswith(parts)}


def digest(value: Any) -> str:
    """Returns 8 hex digits over the JSON of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def key(config: Config, seed: bool = True) -> str:
    """Returns 8 hex digits over `settings`; without the seed, those that all seeds share."""
    return digest({name: x for name, x in settings(config).items() if seed or name != "seed"})


def mark(config: Config) -> str:
    """Returns the 8 hex digits of a folder's name, which count what they have always counted."""
    counted = {**settings(config), "recipe.log_every": config.recipe.log_every}
    if config.augmentation.cutmix is not None:
        counted["augmentation.cutmix.labels"] = "area"  # a key that is gone
    return digest(counted)


@dataclass(frozen=True, order=True)
class RowId:
    """What identifies a row of a table, whatever its text.

    A row has the name that its `study` gives it, and in a sweep a `point`: swept keys and values.
    """

    study: str = ""  # as typed: table1, or the path of a file
    row: str = ""
    point: tuple[tuple[str, str], ...] = ()
    column: str = ""


def changes(ours: Config, theirs: Config) -> list[str]:
    """Returns `key=ours instead of theirs` for each setting that distinguishes two runs."""
    one, other = settings(ours), settings(theirs)
    return [
        f"{name}={one.get(name)} instead of {other.get(name)}"
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    ]


def as_yaml(config: Config) -> str:
    """Returns the configuration as the folder of the run holds it."""
    return yaml.safe_dump(asdict(config), sort_keys=False)


# --- folder -------------------------------------------------------------------------------------


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
        assert config.name is not None, "start.point() sets the name"
        return cls(Path(config.output_root, config.name))

    # What is here

    def check(self, config: Config) -> None:
        """Raises UserError if this folder cannot be used for this run."""
        if not is_first_rank():
            return  # the first rank may already have created it for the others
        place = next(x for x in self.path.absolute().parents if os.path.lexists(x))
        if not place.is_dir():
            raise UserError(f"output_root={config.output_root}: {place} is no folder")
        if not self.is_begun():
            return
        if config.resume != "auto":
            advice = "resume it with resume=auto or choose another name"
            raise UserError(f"name={config.name}: {self.path} exists; {advice}")
        if found := changes(config, self.read_config()):
            others = ", ".join(found)
            raise UserError(
                f"name={config.name}: {self.path} holds another run, this one has {others}"
            )

    def is_begun(self) -> bool:
        """Whether anything is here: an empty folder is no run.

        Nor is that of a process that was killed before it wrote the configuration.
        """
        if not os.path.lexists(self.path):
            return False
        if self.lock_path.exists():
            return self.config_path.exists() or bool(self.checkpoints())
        return not self.path.is_dir() or any(self.path.iterdir())

    def check_data(self, now: Mapping[str, str]) -> None:
        """Raises UserError if the run has begun on other data than those of the record `now`."""
        then = self.read_summary().get("data") or {}
        gaps = [f"{then[x]} then, {now[x]} now" for x in then if x in now and then[x] != now[x]]
        if gaps and (self.is_finished() or self.checkpoints()):
            raise UserError(
                f"name={self.path.name}: {self.path} was trained on other data: {', '.join(gaps)}; "
                "choose another output_root, or move that folder away"
            )

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
        return "interrupted" if self.config_path.exists() else "not started"

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

    def checkpoints(self) -> list[Path]:
        """Returns the checkpoints to resume from, newest first."""
        return [path for path in (self.last_path, self.previous_path) if path.exists()]

    def weights(self, which: str) -> list[Path]:
        """Returns the files to read `last` or `best` weights from, the first readable one counts.

        Raises UserError if there are none.
        """
        best = [self.best_path] if self.best_path.exists() else []
        files = {"last": self.checkpoints(), "best": best}
        if not files.get(which):
            held = [name for name, found in files.items() if found]
            reason = f"must be last or best; it holds {' and '.join(held) or 'neither'}"
            raise UserError(f"run={self.path} weights={which}: {reason}")
        return files[which]

    # Reading

    def read_config(self) -> Config:
        """Returns the configuration, of a checkpoint if the file is damaged.

        Raises UserError if this is not a run folder.
        """
        try:
            with _named(self.config_path):
                raw = _whole_yaml(self.config_path.read_text())
        except UserError as error:
            raw = self._rescued("config", error)
            if not raw:
                raise
        with _named(self.config_path):
            return saved(raw)

    def read_summary(self) -> dict[str, Any]:
        """Returns the summary, of a checkpoint if the file is damaged; empty if there is none."""
        if not (self.summary_path.exists() or self.checkpoints()):
            return {}
        try:
            with _named(self.summary_path):
                return {**json.loads(self.summary_path.read_text())}
        except UserError as error:
            if self.best_path.exists() and not self.checkpoints():
                raise  # the weights of a run that may be finished
            return self._rescued("summary", error)

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
            _warn_once(f"{error}; the run goes on without the summary")
        return held.get(entry, {})

    def read_metrics(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns (step lines, epoch lines) of metrics.jsonl."""
        if not self.metrics_path.exists():
            return [], []
        with _named(self.metrics_path):
            text, _, _ = self.metrics_path.read_text().rpartition("\n")  # drops a truncated line
            lines = [{**json.loads(line)} for line in text.splitlines()]
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
        write_text(self.config_path, f"{YAML_BEGIN}{as_yaml(config)}{YAML_END}")
        self.metrics_path.touch()
        os.truncate(self.metrics_path, self._usable_metrics(metrics_size))
        flush(self.metrics_path)
        if checkpoint is not None:
            os.replace(checkpoint, self.last_path)
            flush(self.last_path.parent)

    def _usable_metrics(self, recorded: int) -> int:
        """Returns the bytes of whole lines among the recorded ones; warns if some are lost."""
        with self.metrics_path.open("rb") as file:
            content = file.read(recorded)
        size = 0
        for line in content.splitlines(keepends=True):
            if not _is_whole(line):
                break
            size += len(line)
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
        with self.metrics_path.open("a") as file:
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

        Those of the files of training are: they wrote them under the lock, on any machine.
        """
        files = (self.config_path, self.summary_path)
        ours = {file for path in files for file in self.path.glob(f".{path.name}.*.tmp")}
        ours |= {*self.last_path.parent.glob(".*.tmp")}
        for temporary in {*self.path.glob(".*.tmp")} | ours:
            if temporary in ours or is_left_over(temporary):
                temporary.unlink(missing_ok=True)


YAML_BEGIN, YAML_END = "---\n", "...\n"  # which a file has that was cut short, and has not


def _whole_yaml(text: str) -> dict[str, Any]:
    """Reads a mapping. ValueError if the text is cut short; earlier revisions wrote no marks."""
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
def _in_checkpoint(checkpoints: tuple[Path, ...], changed: int) -> dict[str, Any]:
    """Returns the `config` and `summary` of the newest readable checkpoint, if it holds them."""
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
    """Names the file that cannot be read or does not hold what it should, in a UserError."""
    try:
        yield
    except Exception as error:  # of the system, of YAML and JSON, of the schema
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def find(config: Config) -> list[RunFolder]:
    """Returns the folders beside each other that hold this run, the one to go on with first.

    That is a finished one, else the longest; of equal ones the original, as the summary of a copy
    has another name. A folder that is not readable is left out: train.py reports it if it is named.
    """
    root, identity = Path(config.output_root), key(config)
    changed = root.stat().st_mtime_ns if root.is_dir() else 0
    found = [RunFolder(root / name) for name, x in _keys(root, changed) if x == identity]

    return sorted(found, key=_progress, reverse=True) if len(found) > 1 else found


def _progress(run: RunFolder) -> tuple[bool, int, bool]:
    """How far a run is, for `find`; a damaged one is behind the others."""
    try:
        summary = run.read_summary()
    except UserError:
        return False, 0, False
    is_original = summary.get("name") == run.path.name
    return summary.get("status") == "finished", run.metrics_size(), is_original


@lru_cache(maxsize=1)
def _keys(root: Path, changed: int) -> list[tuple[str, str]]:
    """Returns (name, key) of each run under `root`; read once for all points of a sweep."""
    keys = []
    for path in sorted(root.glob("*/config.yaml")):
        with suppress(UserError):
            keys.append((path.parent.name, key(RunFolder(path.parent).read_config())))
    return keys


# --- lock ---------------------------------------------------------------------------------------

PATIENCE = 0.5  # seconds: a reader may hold the lock briefly, or its owner may be exiting
PATIENCE_OF_RANKS = 60.0  # of torchrun: the first rank before a restart may still shut down


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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(PATIENCE_OF_RANKS if launched_ranks() else PATIENCE)
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    except Timeout:
        holder = path.read_text().strip() or "another process"
        raise UserError(f"name={folder.path.name}: {holder} is training {folder.path}") from None
    except OSError as error:
        raise UserError(f"output_root={folder.path.parent}: {reason_of(error)}") from error
    try:
        folder.remove_left_over()
        yield
    finally:
        with suppress(OSError):  # the folder is gone, or the one above holds other runs
            if [*folder.path.iterdir()] == [path]:  # beside other files it marks a folder of ours
                path.unlink()
                folder.path.rmdir()
                folder.path.parent.rmdir()
        lock.release()
