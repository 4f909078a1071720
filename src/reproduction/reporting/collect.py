"""From the folders under outputs/ to the results of each cell; never stops at a broken folder.

Of a folder: config.yaml, summary.json and the end of metrics.jsonl.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.config import Config
from reproduction.reporting.curves import lines_backwards
from reproduction.runs.folder import RunFolder, differing, identity
from reproduction.runs.locking import is_held
from reproduction.system.errors import UserError, first_line, in_one_line
from reproduction.system.reading import parse_json

REPORT = "report"
OURS = (REPORT, "data")  # these folders under outputs/ are ours, unless they hold a run
MOST_KEYS = 3  # that the note on a run of another configuration names
METRICS = ("top1_last", "top1_median10", "top1_best", "top5_last", "top5_best")
ORDERED = (  # the first is never less
    ("top1_best", "top1_last"),
    ("top1_best", "top1_median10"),
    ("top5_best", "top5_last"),
)
LONGEST = 300  # characters of an error


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a finished run has reached, in percent, and what is known of how; None: not known."""

    accuracy: Mapping[str, float]  # of each of METRICS
    seconds: float | None
    devices: int | None
    hardware: str | None
    revision: str | None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder; `identity` is without the seed, `written` the time of its summary in s."""

    folder: str
    identity: Mapping[str, Any]
    seed: int
    status: str
    written: float
    error: str | None = None
    result: Result | None = None  # of a finished run, and only of one


@dataclass(frozen=True)
class Unused:
    """A folder that counts for no cell, and why, in one line."""

    folder: str
    reason: str


@dataclass(frozen=True)
class CellRuns:
    """The runs of one configuration: finished ones by seed, and those that are not."""

    finished: Mapping[int, Run] = dataclasses.field(default_factory=dict)
    others: tuple[Run, ...] = ()

    def all(self) -> list[Run]:
        """In the order of seeds."""
        return sorted((*self.finished.values(), *self.others), key=_by_seed)


@dataclass(frozen=True)
class Collection:
    """experiment -> its runs (cells of one configuration share theirs), and what is left over."""

    cells: Mapping[str, CellRuns]
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)  # one per configuration
    unused: tuple[Unused, ...] = ()

    def experiments(self, run: Run) -> list[str]:
        """The cells that `run` counts for."""
        return [name for name, cell in self.cells.items() if run in cell.all()]

    def runs(self) -> list[Run]:
        """Every run of a cell once, in the order of the cells, then of seeds."""
        return list(
            {run.folder: run for cell in self.cells.values() for run in cell.all()}.values()
        )


def collect(outputs: Path, configs: Mapping[str, Config]) -> Collection:
    """The runs under `outputs` that have the configuration of a cell, but for the seed.

    `configs` maps an experiment to its resolved configuration.
    """
    runs, unused = _read_all(outputs)
    wanted = {name: identity(dataclasses.asdict(config)) for name, config in configs.items()}
    for shared in wanted.values():
        shared.pop("seed")
    keys = {name: _key(shared) for name, shared in wanted.items()}
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = _key(run.identity)
        if key in keys.values():
            groups.setdefault(key, []).append(run)
        else:
            unused.append(Unused(run.folder, _nearest(run, wanted)))
    chosen = {}
    for key, group in groups.items():
        chosen[key], left_over = _choose(group)
        unused += left_over
    cells = {name: chosen.get(key, CellRuns()) for name, key in keys.items()}
    return Collection(cells, keys, tuple(sorted(unused, key=lambda entry: entry.folder)))


def _key(shared: Mapping[str, Any]) -> str:
    """One text per configuration."""
    return json.dumps(shared, sort_keys=True, default=repr)


def _read_all(outputs: Path) -> tuple[list[Run], list[Unused]]:
    names = sorted(entry.name for entry in outputs.iterdir() if entry.is_dir())
    runs: list[Run] = []
    unused: list[Unused] = []
    for name in names:
        folder = outputs / name
        if name.startswith(".") or (name in OURS and not (folder / "config.yaml").exists()):
            continue
        try:
            if not name.isprintable():
                raise UserError("its name cannot be printed")
            runs.append(_read(RunFolder(folder)))
        except UserError as error:
            reason = str(error).replace(f"{folder}/", "").replace(f"{folder} ", "")
            unused.append(Unused(short(name), short(reason)))
        except (OSError, RecursionError, OverflowError) as error:
            reason = f"not readable: {short(first_line(error))}"
            unused.append(Unused(short(name), reason))
    return runs, unused


def _choose(group: list[Run]) -> tuple[CellRuns, list[Unused]]:
    """One run per seed: the finished one, of several the one whose summary is newest."""
    finished: dict[int, Run] = {}
    others: list[Run] = []
    unused: list[Unused] = []
    newest_first = sorted(group, key=lambda run: (-run.written, run.folder))
    for run in sorted(newest_first, key=lambda run: run.result is None):
        taken = finished.get(run.seed)
        if taken is not None:
            reason = f"seed {run.seed} again ({run.status}): {taken.folder} is counted"
            newer = ", the newer of the finished ones" if run.result is not None else ""
            unused.append(Unused(run.folder, reason + newer))
        elif run.result is not None:
            finished[run.seed] = run
        else:
            others.append(run)
    return CellRuns(dict(sorted(finished.items())), tuple(sorted(others, key=_by_seed))), unused


def _by_seed(run: Run) -> tuple[int, str]:
    return run.seed, run.folder


def _nearest(run: Run, wanted: Mapping[str, Mapping[str, Any]]) -> str:
    """How the run differs from the cell that it is closest to."""
    gaps = ((differing(run.identity, theirs), name) for name, theirs in wanted.items())
    pairs, name = min(gaps, key=lambda gap: len(gap[0]), default=([], None))
    reason = f"{run.status}, not the configuration of a cell at this scale"
    if not 0 < len(pairs) <= MOST_KEYS:
        return reason
    return short(f"{reason}: differs from {name} in {', '.join(pairs)}")


def _read(folder: RunFolder) -> Run:
    """UserError says in one line why it is no run, or a broken one."""
    found = identity(folder.read_config())
    seed = found.pop("seed", None)
    if type(seed) is not int:
        raise UserError("is not a run folder: config.yaml holds no seed")
    summary = folder.read_summary()
    written = folder.summary_path.stat().st_mtime if summary else 0.0
    status = short(str(summary.get("status", "not begun")))
    if status == "running" and not is_held(folder):
        status = "interrupted"  # a killed run could not say so
    result = _result(summary, found) if status == "finished" else None
    error = summary.get("error") if result is None else None
    return Run(
        folder=folder.path.name,
        identity=found,
        seed=seed,
        status=status if result is not None else status + _progress(folder, found),
        written=written,
        error=None if error is None else short(str(error)),
        result=result,
    )


def _result(summary: dict[str, Any], found: Mapping[str, Any]) -> Result:
    """Raises UserError if a finished run's summary cannot be that of its configuration."""
    accuracy = {}
    for key in METRICS:
        value = _number(summary.get(key))
        if value is None or not 0 <= value <= 100:
            said = f"{key} is {summary.get(key)}, no percentage"
            raise UserError(f"summary.json: finished, but {said}")
        accuracy[key] = value
    for greater, less in ORDERED:
        above, below = accuracy[greater], accuracy[less]
        if above < below:
            raise UserError(f"summary.json: {greater}={above} must not be below {less}={below}")
    epochs, steps, whole = summary.get("epochs"), summary.get("steps"), found.get("recipe.epochs")
    if epochs != whole and (steps is None or steps != found.get("recipe.max_steps")):
        raise UserError(f"summary.json: finished, but after {epochs} of {whole} epochs")
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


def _progress(folder: RunFolder, found: Mapping[str, Any]) -> str:
    """`, in epoch 3 of 310` by the last whole line of metrics.jsonl; nothing if there is none."""
    if not folder.metrics_path.exists():
        return ""
    for line in lines_backwards(folder.metrics_path):
        try:
            epoch = parse_json(line)["epoch"]
        except (ValueError, TypeError, KeyError):
            continue  # cut off, or no line of ours
        return f", in epoch {short(str(epoch))} of {found.get('recipe.epochs')}"
    return ""


def short(text: str) -> str:
    """`text` in one line that fits into a report."""
    return in_one_line(text, LONGEST)
