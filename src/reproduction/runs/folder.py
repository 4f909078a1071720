"""The run folder, which all reports read.

config.yaml       resolved configuration
metrics.jsonl     one line per training step and one per evaluated epoch
summary.json      status (running, finished, interrupted, failed), data, result, accuracies by epoch
.lock             held by the training process, see locking.py
checkpoints/      last.pt and older ones to resume from, best.safetensors for evaluation
"""

import dataclasses
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from reproduction.config import Config
from reproduction.runs.identity import differing, hash_of, saved, upgraded
from reproduction.system.errors import UserError, first_line
from reproduction.system.ranks import is_first_rank
from reproduction.system.reading import parse_yaml
from reproduction.system.storage import TEMPORARIES, clear_leftovers, sync, versions, write_text

LOCK = ".lock"
PUBLISHED = "model.safetensors"  # weights in a folder written by scripts/publish.py


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
        assert config.name is not None, "resolve() sets the name"
        return cls(Path(config.output_root, config.name))

    def check(self, config: Config) -> None:
        """Raises UserError if this folder cannot be used for this run."""
        if not is_first_rank():
            return  # the first rank may already have created the folder
        if not os.path.lexists(self.path):
            check_writable(self.path, f"output_root={config.output_root}")
            return
        if self._has_no_config_yet():
            return
        if config.resume == "never":
            raise UserError(
                f"name={config.name}: {self.path} exists; resume it with resume=auto or choose "
                "another name=..."
            )
        if pairs := differing(config, saved(self.read_config())):
            advice = "choose another name=..."
            if pairs[0].startswith("recipe.epochs=") and self.is_finished():
                advice += (
                    ": a finished run cannot be extended, as its learning rate has decayed, but "
                    f"model.weights={self.best_path} starts from its weights"
                )
            raise UserError(
                f"name={config.name}: {self.path} holds another run, this one has "
                f"{', '.join(pairs)}; {advice}"
            )

    def _has_no_config_yet(self) -> bool:
        """Whether a run ended here, killed or refused, before it wrote its configuration."""
        expected = {"checkpoints", "wandb", "tensorboard", "summary.json", LOCK}
        expected |= {entry.name for entry in self.path.glob(TEMPORARIES)}
        return self.path.is_dir() and {entry.name for entry in self.path.iterdir()} <= expected

    def create(self, config: Config) -> None:
        """Creates the folder and writes the configuration."""
        self.last_path.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
        write_text(self.config_path, text)

    def read_config(self) -> dict[str, Any]:
        """Returns the configuration in present keys. UserError if this is not a run folder."""
        try:
            config = parse_yaml(self.config_path.read_text())
        except (FileNotFoundError, NotADirectoryError) as error:
            reason = "there is no such folder"
            if self.path.exists():
                reason = "it has no config.yaml" if self.path.is_dir() else "it is a file"
            raise UserError(f"{self.path} is not a run folder: {reason}") from error
        except (OSError, ValueError) as error:
            reason = first_line(error)
            raise UserError(f"{self.path} is not a run folder: config.yaml: {reason}") from error
        if not isinstance(config, dict):
            raise UserError(f"{self.path} is not a run folder: config.yaml holds no configuration")
        return upgraded(config)

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
        head = json.dumps({key: x for key, x in summary.items() if key != "log"}, indent=2)
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

    def sync_metrics(self) -> None:
        """Flushes metrics.jsonl to disk."""
        if self.metrics_path.exists():
            sync(self.metrics_path)

    def checkpoints(self) -> list[Path]:
        """Returns the checkpoints to resume from, newest first."""
        return versions(self.last_path)

    def weights(self, which: str) -> list[Path]:
        """Returns the files to read `last` or `best` weights from, the first readable one counts.

        Those of a published folder are the last. Raises UserError if there are none.
        """
        if which not in ("last", "best"):
            raise UserError(f"weights={which}: must be last or best")
        files = self.checkpoints() if which == "last" else [self.best_path]
        if which == "last" and (self.path / PUBLISHED).is_file():
            files = [self.path / PUBLISHED]
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

    def check_metrics(self, size: int) -> None:
        """Raises UserError if metrics.jsonl has fewer bytes than a checkpoint recorded."""
        if self.metrics_size() < size:
            raise UserError(f"{self.metrics_path}: is shorter than when the checkpoint was written")

    def trim_metrics(self, size: int) -> None:
        """Truncates metrics.jsonl to the `size` that a checkpoint recorded."""
        if self.metrics_path.exists():
            os.truncate(self.metrics_path, size)


def find_runs(root: str | Path) -> dict[str, RunFolder]:
    """Returns the runs directly under `root` by hash, preferring finished ones."""
    runs: dict[str, RunFolder] = {}
    finished: dict[str, RunFolder] = {}
    for path in sorted(Path(root).glob("*/config.yaml")):
        folder = RunFolder(path.parent)
        # not a run, or broken: train.py reports it
        with suppress(UserError, TypeError):
            key = hash_of(folder.read_config())
            runs.setdefault(key, folder)
            if folder.is_finished():
                finished.setdefault(key, folder)
    return runs | finished


def check_writable(path: Path, setting: str) -> None:
    """Raises UserError, naming the setting, if `path` cannot be created."""
    place = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise UserError(f"{setting}: {place} is not a writable folder")
