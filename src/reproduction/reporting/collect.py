"""Collects the results of each cell from the run folders; damaged folders are reported as unused.

Reads config.yaml, summary.json and the end of metrics.jsonl.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from reproduction.config import Config
from reproduction.reporting.cells import SCALES
from reproduction.reporting.curves import lines_backwards
from reproduction.runs.folder import RunFolder, differing, identity
from reproduction.runs.locking import status_of
from reproduction.system.errors import UserError, first_line, in_one_line
from reproduction.system.reading import parse_json

REPORT = "report"
# folders under outputs/ that are skipped unless they hold a run
NO_RUNS = (REPORT, "data", "benchmark", "check-gpu", "evaluations", "published", *SCALES)
MOST_KEYS = 3  # largest number of differing keys that a reason lists
METRICS = ("top1_last", "top1_median10", "top1_best", "top5_last", "top5_best")
ORDERED = (  # pairs whose first metric is never below the second
    ("top1_best", "top1_last"),
    ("top1_best", "top1_median10"),
    ("top5_best", "top5_last"),
)
LONGEST = 300  # characters of a text from a run folder


def report_folder(outputs: Path) -> Path:
    """Creates the folder of the report; UserError if it is a run folder."""
    folder = outputs / REPORT
    if (folder / "config.yaml").exists():
        raise UserError(f"{folder}: is the folder of a run, the report needs this name")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass(frozen=True, kw_only=True)
class Result:
    """The accuracies of a finished run in percent, by METRICS, and its provenance if known."""

    accuracy: Mapping[str, float]
    seconds: float | None
    devices: int | None
    hardware: str | None
    revision: str | None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder; `identity` excludes the seed, `written` is the mtime of the summary."""

    folder: str
    identity: Mapping[str, Any]
    seed: int
    status: str
    written: float
    error: str | None = None
    result: Result | None = None  # of finished runs only


@dataclass(frozen=True)
class Unused:
    """A folder that belongs to no cell, and the reason in one line."""

    folder: str
    reason: str


@dataclass(frozen=True)
class CellRuns:
    """The runs of one configuration: the finished ones by seed, and the others."""

    finished: Mapping[int, Run] = dataclasses.field(default_factory=dict)
    others: tuple[Run, ...] = ()

    def all(self) -> list[Run]:
        """Returns all runs in the order of their seeds."""
        return _sorted([*self.finished.values(), *self.others])


@dataclass(frozen=True)
class Collection:
    """The runs and the configuration key of each experiment, and the unused folders.

    Experiments of the same configuration have the same key and share their runs.
    """

    cells: Mapping[str, CellRuns]
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unused: tuple[Unused, ...] = ()

    def experiments(self, run: Run) -> list[str]:
        """Returns the experiments that `run` belongs to."""
        return [name for name, cell in self.cells.items() if run in cell.all()]

    def runs(self) -> list[Run]:
        """Returns each used run once, in the order of the cells, then of the seeds."""
        return list(
            {run.folder: run for cell in self.cells.values() for run in cell.all()}.values()
        )


def collect(outputs: Path, configs: Mapping[str, Config]) -> Collection:
    """Assigns the runs under `outputs` to the experiments of the same configuration and any seed.

    `configs` maps each experiment to its resolved configuration.
    """
    runs, unused = _read_all(outputs)
    identities = {name: identity(dataclasses.asdict(config)) for name, config in configs.items()}
    for shared in identities.values():
        shared.pop("seed")
    keys = {name: _key(shared) for name, shared in identities.items()}
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = _key(run.identity)
        if key in keys.values():
            groups.setdefault(key, []).append(run)
        else:
            unused.append(Unused(run.folder, _mismatch(run, identities)))
    chosen = {}
    for key, group in groups.items():
        chosen[key], duplicates = _choose(group)
        unused += duplicates
    cells = {name: chosen.get(key, CellRuns()) for name, key in keys.items()}
    return Collection(cells, keys, tuple(sorted(unused, key=attrgetter("folder"))))


def _key(shared: Mapping[str, Any]) -> str:
    return json.dumps(shared, sort_keys=True, default=repr)


def _read_all(outputs: Path) -> tuple[list[Run], list[Unused]]:
    runs: list[Run] = []
    unused: list[Unused] = []
    for folder in sorted(entry for entry in outputs.iterdir() if entry.is_dir()):
        name = folder.name
        if name.startswith(".") or (name in NO_RUNS and not (folder / "config.yaml").exists()):
            continue
        try:
            if not name.isprintable():
                raise UserError("its name cannot be printed")
            runs.append(_read(RunFolder(folder)))
        except UserError as error:
            reason = str(error).replace(f"{folder}/", "").replace(f"{folder} ", "")
            unused.append(Unused(short(name), short(reason)))
        except (OSError, RecursionError, OverflowError) as error:
            unused.append(Unused(short(name), f"not readable: {short(first_line(error))}"))
    return runs, unused


def _choose(group: list[Run]) -> tuple[CellRuns, list[Unused]]:
    """Keeps the finished run with the newest summary of each seed, or else its unfinished runs."""
    finished: dict[int, Run] = {}
    others: list[Run] = []
    unused: list[Unused] = []
    for run in sorted(group, key=lambda run: (run.result is None, -run.written, run.folder)):
        kept = finished.get(run.seed)
        if kept is not None:
            reason = f"seed {run.seed} again ({run.status}): {kept.folder} is counted"
            newer = ", the newer of the finished ones" if run.result is not None else ""
            unused.append(Unused(run.folder, reason + newer))
        elif run.result is not None:
            finished[run.seed] = run
        else:
            others.append(run)
    return CellRuns(dict(sorted(finished.items())), tuple(_sorted(others))), unused


def _sorted(runs: list[Run]) -> list[Run]:
    return sorted(runs, key=attrgetter("seed", "folder"))


def _mismatch(run: Run, identities: Mapping[str, Mapping[str, Any]]) -> str:
    """Describes how the run differs from the experiment that is closest to it."""
    gaps = ((differing(run.identity, theirs), name) for name, theirs in identities.items())
    pairs, name = min(gaps, key=lambda gap: len(gap[0]), default=([], None))
    reason = f"{run.status}, not the configuration of a cell at this scale"
    if not 0 < len(pairs) <= MOST_KEYS:
        return reason
    return short(f"{reason}: differs from {name} in {', '.join(pairs)}")


def _read(folder: RunFolder) -> Run:
    """Raises UserError with the reason if the folder holds no run or a damaged one."""
    config = identity(folder.read_config())
    seed = config.pop("seed", None)
    if type(seed) is not int:
        raise UserError("is not a run folder: config.yaml holds no seed")
    summary = folder.read_summary()
    status: str = status_of(folder, summary)
    result = error = None
    if status == "finished":
        result = _result(summary, config)
    else:
        status += _progress(folder, config)
        error = summary.get("error")
    return Run(
        folder=folder.path.name,
        identity=config,
        seed=seed,
        status=status,
        written=folder.summary_path.stat().st_mtime if summary else 0.0,
        error=None if error is None else short(str(error)),
        result=result,
    )


def _result(summary: dict[str, Any], config: Mapping[str, Any]) -> Result:
    """Raises UserError if the summary of a finished run contradicts itself or the configuration."""
    accuracy = {}
    for key in METRICS:
        value = _number(summary.get(key))
        if value is None or not 0 <= value <= 100:
            raise UserError(
                f"summary.json: finished, but {key} is {summary.get(key)}, no percentage"
            )
        accuracy[key] = value
    for greater, less in ORDERED:
        above, below = accuracy[greater], accuracy[less]
        if above < below:
            raise UserError(f"summary.json: {greater}={above} must not be below {less}={below}")
    done, steps, epochs = summary.get("epochs"), summary.get("steps"), config.get("recipe.epochs")
    if done != epochs and (steps is None or steps != config.get("recipe.max_steps")):
        raise UserError(f"summary.json: finished, but after {done} of {epochs} epochs")
    devices, hardware, revision = map(summary.get, ("devices", "hardware", "git_revision"))
    return Result(
        accuracy=accuracy,
        seconds=_number(summary.get("seconds")),
        devices=devices if type(devices) is int else None,
        hardware=None if hardware is None else short(str(hardware)),
        revision=None if revision is None else short(str(revision)),
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _progress(folder: RunFolder, config: Mapping[str, Any]) -> str:
    """Returns `, in epoch 3 of 310` from the last intact line of metrics.jsonl, if there is one."""
    if not folder.metrics_path.exists():
        return ""
    for line in lines_backwards(folder.metrics_path):
        try:
            epoch = parse_json(line)["epoch"]
        except (ValueError, TypeError, KeyError):
            continue  # truncated or damaged
        return f", in epoch {short(str(epoch))} of {config.get('recipe.epochs')}"
    return ""


def short(text: str) -> str:
    """Returns `text` as one line of bounded length."""
    return in_one_line(text, LONGEST)
