"""A run: its folder, its identity, and the lock that one process at a time holds.

config.yaml       configuration, as it was when the run began
metrics.jsonl     one line per training step and one per evaluated epoch
summary.json      status (running, finished, interrupted, failed), data, result, accuracies by epoch
.lock             held by the training process
checkpoints/      last.pt and older ones to resume from, best.safetensors for evaluation
"""

import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml
from filelock import FileLock, Timeout

from reproduction.config import SOURCES, Config, parse
from reproduction.system import (
    TEMPORARIES,
    RunLocked,
    UserError,
    clear_leftovers,
    first_line,
    is_first_rank,
    restarts,
    versions,
    write_text,
)

# --- identity -----------------------------------------------------------------------------------

# Keys that do not change a result, and so not the identity of a run.
NOT_RESULT = (
    *("name", "output_root", "resume", "device", "compile", "checkpoint", "logger"),
    *("dataset.workers", "model.checkpoint_blocks"),
)
FIXED = ("digits", "cifar10", "cifar100", "imagenet1k")  # data sets whose images are known
PATHS = ("dataset.root", "model.weights")  # keys that count however they are spelled
NOT_IN_NAMES = re.compile(r"[^\w.+=-]+", re.ASCII)  # what a default name leaves out
LONGEST_NAME = 120  # bytes of a default name


class Gone(list[Any]):
    """A key that the schema has no more: its values (any, if none is named) that still hold."""


# What saved configurations mean: keys that are gone, and first defaults of keys that have another.
UPGRADES: dict[str, Any] = {
    "restarts": Gone(),
    "checkpoint.every_steps": Gone(),
    "recipe.non_finite": Gone(["fail"]),
    "augmentation.htm.non_finite": Gone(["fail"]),
    "augmentation.mode": Gone(["batch"]),
    "dataset.broken_images": Gone(["refuse"]),
    "dataset.content": Gone(),
    "dataset.memory_mib": Gone(),
    "dataset.statistics": Gone([None]),
    "model.drop": Gone([0.0]),
    "model.proj_drop_rate": Gone([0.0]),
    "recipe.momentum": Gone([0.9]),
    "recipe.tf32": Gone([False]),
    "recipe.transforms.erasing_count": Gone([1]),
    "recipe.transforms.ratio": Gone([[0.75, 1.3333], [1.0, 1.0]]),
    "augmentation.htm.tau": 2.0,
    "augmentation.htm.rho": 0.005,
}


def upgraded(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a saved configuration in the keys of the present schema.

    Raises UserError for a setting that the present code does not have any more.
    """
    tree = deepcopy(dict(raw))
    for key, value in UPGRADES.items():
        *groups, name = key.split(".")
        group: Any = tree
        for part in groups:
            group = group.get(part) if isinstance(group, dict) else None
        if not isinstance(group, dict):
            continue
        if not isinstance(value, Gone):
            group.setdefault(name, value)
        elif name in group and (found := group.pop(name)) not in (value or [found]):
            raise UserError(f"{key}={found}: was a setting of an earlier revision, and is gone")
    data = tree.get("dataset")
    if isinstance(data, dict) and data.get("source") is None:  # once named for own data alone
        data["source"] = f"{SOURCES}:{data.get('name')}"
    return tree


def saved(raw: Mapping[str, Any]) -> Config:
    """Returns a saved configuration of any revision as the present schema understands it."""
    return parse(upgraded(raw))


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
        group = tree
        for part in groups:
            group = group.setdefault(part, {})
        group[name] = value
    return tree


def changes_result(key: str) -> bool:
    """Whether a dotted key may distinguish runs."""
    return not any(f"{key}.".startswith(f"{name}.") for name in NOT_RESULT)


def plain_path(path: str) -> str:
    """Returns the path from the working folder if it lies there, else the absolute one."""
    short = os.path.relpath(path)
    return os.path.abspath(path) if short.split(os.sep)[0] == ".." else short


def settings(config: Config) -> dict[str, Any]:
    """Returns the dotted keys and values that determine a result: the identity of a run.

    The folder of a fixed data set is not among them, as its images may be moved.
    """
    is_fixed = config.dataset.name in FIXED
    return {
        key: plain_path(value) if key in PATHS and value is not None else value
        for key, value in flat(asdict(config))
        if changes_result(key) and not (is_fixed and key == "dataset.root")
    }


def digest(value: Any) -> str:
    """Returns 8 hex digits over the JSON of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def key(config: Config, seed: bool = True) -> str:
    """Returns 8 hex digits over `settings`; without the seed, those that all seeds share."""
    return digest({name: x for name, x in settings(config).items() if seed or name != "seed"})


def changes(ours: Config, theirs: Config) -> list[str]:
    """Returns `key=ours instead of theirs` for each setting that distinguishes two runs."""
    one, other = settings(ours), settings(theirs)
    return [
        f"{name}={one.get(name)} instead of {other.get(name)}"
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    ]


def default_name(config: Config, head: str = "", words: Sequence[str] = ()) -> str:
    """Returns `<head or model-dataset-stack>[-key=value...]-s<seed>-<key>`.

    `words` are overrides; of each key the last part is named, in plain characters, as far as
    LONGEST_NAME allows.
    """
    stack = "+".join(config.augmentation.stack) or "plain"
    name = head.replace("/", "-") or f"{config.model.name}-{config.dataset.name}-{stack}"
    tail = f"-s{config.seed}-{key(config)}"
    for word in words:
        last, _, value = word.lstrip("+~").partition("=")
        value = value.replace(",", "+")
        name += "-" + NOT_IN_NAMES.sub("", f"{last.rpartition('.')[2]}={value}")
    return name.encode()[: LONGEST_NAME - len(tail)].decode(errors="ignore") + tail


def as_yaml(config: Config) -> str:
    """Returns the configuration as the folder of the run holds it."""
    return yaml.safe_dump(asdict(config), sort_keys=False)


# --- folder -------------------------------------------------------------------------------------

LOCK = ".lock"
Status = Literal["finished", "running", "interrupted", "failed", "not started"]


class RunFolder:
    """Reads and writes one run folder."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.summary_path = self.path / "summary.json"
        self.report_path = self.path / "report.md"
        self.last_path = self.path / "checkpoints" / "last.pt"
        self.best_path = self.path / "checkpoints" / "best.safetensors"

    @classmethod
    def of(cls, config: Config) -> "RunFolder":
        assert config.name is not None, "start.point() sets the name"
        return cls(Path(config.output_root, config.name))

    def check(self, config: Config) -> None:
        """Raises UserError if this folder cannot be used for this run."""
        if not (is_first_rank() and os.path.lexists(self.path)):
            return  # the first rank may already have created it for the others
        expected = {"checkpoints", "wandb", "tensorboard", "summary.json", LOCK}
        expected |= {entry.name for entry in self.path.glob(TEMPORARIES)}
        if self.path.is_dir() and {entry.name for entry in self.path.iterdir()} <= expected:
            return  # of a run that was killed before it wrote its configuration
        place = f"name={config.name}: {self.path}"
        if config.resume == "never":
            raise UserError(f"{place} exists; resume it with resume=auto or choose another name")
        if found := changes(config, self.read_config()):
            raise UserError(f"{place} holds another run, this one has {', '.join(found)}")

    def check_data(self, now: Mapping[str, str]) -> None:
        """Raises UserError if the run has begun on other data than those of the record `now`."""
        then = self.read_summary().get("data") or {}
        gaps = [f"{then[x]} then, {now[x]} now" for x in then if x in now and then[x] != now[x]]
        if gaps and (self.is_finished() or self.checkpoints()):
            raise UserError(
                f"name={self.path.name}: {self.path} was trained on other data: {', '.join(gaps)}; "
                "choose another output_root, or move that folder away"
            )

    def create(self, config: Config) -> None:
        """Creates the folder and writes the configuration."""
        self.last_path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.config_path, as_yaml(config))

    def read_config(self) -> Config:
        """Returns the configuration. Raises UserError if this is not a run folder."""
        place = f"{self.path} is not a run folder"
        try:
            raw = yaml.safe_load(self.config_path.read_text())
        except (FileNotFoundError, NotADirectoryError) as error:
            reason = "it has no config.yaml" if self.path.is_dir() else "there is no such folder"
            raise UserError(f"{place}: {reason}") from error
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserError(f"{place}: config.yaml: {first_line(error)}") from error
        if not isinstance(raw, dict):
            raise UserError(f"{place}: config.yaml holds no configuration")
        try:
            return saved(raw)
        except UserError as error:
            raise UserError(f"{self.config_path}: {error}") from error

    def read_summary(self) -> dict[str, Any]:
        """Returns the summary, empty if none has been written."""
        if not self.summary_path.exists():
            return {}
        try:
            summary = json.loads(self.summary_path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{self.summary_path}: not readable: {first_line(error)}") from error
        if not isinstance(summary, dict):
            raise UserError(f"{self.summary_path}: holds no summary")
        return summary

    def is_finished(self) -> bool:
        """Whether the run is finished and has its result."""
        summary = self.read_summary()
        return summary.get("status") == "finished" and "top1_last" in summary

    def write_summary(self, **entries: Any) -> dict[str, Any]:
        """Adds entries to the summary and returns the result; each epoch of `log` is a line."""
        summary = self.read_summary() | entries
        head = json.dumps({name: x for name, x in summary.items() if name != "log"}, indent=2)
        lines = ",\n".join(f"    {json.dumps(line)}" for line in summary.get("log", ()))
        log = f',\n  "log": [\n{lines}\n  ]' if lines else ""
        write_text(self.summary_path, head.removesuffix("\n}") + log + "\n}\n")
        return summary

    def read_metrics(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns (step lines, epoch lines) of metrics.jsonl."""
        if not self.metrics_path.exists():
            return [], []
        try:
            text, _, _ = self.metrics_path.read_text().rpartition("\n")  # drops a truncated line
            lines = [json.loads(line) for line in text.splitlines()]
            if not all(isinstance(line, dict) for line in lines):
                raise ValueError("holds a line that is not a mapping")
        except (OSError, ValueError) as error:
            raise UserError(f"{self.metrics_path}: not readable: {first_line(error)}") from error
        return [x for x in lines if "step" in x], [x for x in lines if "step" not in x]

    def append_metrics(self, lines: list[dict[str, Any]]) -> None:
        """Appends the lines; a part that a full disk leaves of them is cut off on a resume."""
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        with self.metrics_path.open("a") as file:
            file.write(text)

    def metrics_size(self) -> int:
        return self.metrics_path.stat().st_size if self.metrics_path.exists() else 0

    def checkpoints(self) -> list[Path]:
        """Returns the checkpoints to resume from, newest first."""
        return versions(self.last_path)

    def weights(self, which: str) -> list[Path]:
        """Returns the files to read `last` or `best` weights from, the first readable one counts.

        Raises UserError if there are none.
        """
        if which not in ("last", "best"):
            raise UserError(f"weights={which}: must be last or best")
        files = self.checkpoints() if which == "last" else [self.best_path]
        if not files or not files[-1].is_file():
            missing = self.last_path if which == "last" else self.best_path
            raise UserError(f"run={self.path}: holds no {missing.name} yet")
        return files

    def resume_from(self, checkpoint: Path | None) -> None:
        """Makes the checkpoint the newest, and removes newer, damaged ones and temporary files."""
        for folder in (self.path, self.last_path.parent):
            clear_leftovers(folder)
        checkpoints = self.checkpoints()
        if checkpoint is not None and checkpoint != self.last_path:
            os.replace(checkpoint, self.last_path)
            for damaged in checkpoints[1 : checkpoints.index(checkpoint)]:
                damaged.unlink()

    def trim_metrics(self, size: int) -> None:
        """Truncates metrics.jsonl to the `size` that a checkpoint recorded."""
        if self.metrics_path.exists():
            os.truncate(self.metrics_path, size)

    def is_held(self) -> bool:
        """Whether another process trains this run. The lock's owner must not call this."""
        path = self.path / LOCK
        if not path.exists():
            return False
        try:
            with FileLock(path, timeout=0):
                return False
        except Timeout:
            return True

    def status(self) -> Status:
        """Returns the status. A killed run, whose summary says `running`, is interrupted.

        The lock's owner must not call this.
        """
        status = self.read_summary().get("status")
        if status == "finished":
            return "finished"
        if self.is_held():
            return "running"
        if status == "failed":
            return "failed"
        return "interrupted" if self.config_path.exists() else "not started"


def find(config: Config) -> list[RunFolder]:
    """Returns the folders beside each other that hold this run: a finished one, the longest first.

    A folder that is not readable is left out: train.py reports it if it is named.
    """
    root, identity = Path(config.output_root), key(config)
    changed = root.stat().st_mtime_ns if root.is_dir() else 0
    found = [RunFolder(root / name) for name, x in _keys(root, changed) if x == identity]
    return sorted(found, key=_length, reverse=True) if len(found) > 1 else found


def _length(folder: RunFolder) -> tuple[bool, int]:
    with suppress(UserError):
        return folder.is_finished(), len(folder.read_metrics()[0])
    return False, 0


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
PATIENCE_OF_RESTARTED = 60.0  # the previous first rank may still be shutting down


@contextmanager
def hold(folder: RunFolder) -> Iterator[None]:
    """Locks the run for this process, on the first rank only. Raises RunLocked if it is taken.

    The system frees the lock when the process ends. A run that is refused leaves no folder.
    """
    if not is_first_rank():
        yield
        return
    path = folder.path / LOCK
    lock = FileLock(path, poll_interval=0.02, fallback_to_soft=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(PATIENCE_OF_RESTARTED if restarts() else PATIENCE)
    except Timeout:
        holder = path.read_text().strip() or "another process"
        raise RunLocked(f"name={folder.path.name}: {holder} is training {folder.path}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be locked ({error.strerror})") from error
    try:
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")  # for RunLocked
        yield
    finally:
        if not folder.config_path.exists():
            path.unlink(missing_ok=True)
            with suppress(OSError):  # it holds something else
                folder.path.rmdir()
                folder.path.parent.rmdir()
        lock.release()
