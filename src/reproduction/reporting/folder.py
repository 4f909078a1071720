"""One run folder as the tables need it: config.yaml, summary.json and the end of metrics.jsonl."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.errors import UserError, first_line, in_one_line
from reproduction.identity import identity
from reproduction.locking import is_held
from reproduction.reading import parse_json
from reproduction.reporting.curves import lines_backwards
from reproduction.runs import RunFolder

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
    parameters: int | None
    macs: int | None
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


def read_run(path: Path) -> Run:
    """Reads one folder; UserError says in one line why it is no run, or a broken one."""
    folder = RunFolder(path)
    try:
        return _read(folder)
    except UserError as error:
        raise UserError(short(str(error).replace(f"{path}/", "").replace(f"{path} ", ""))) from None
    except (OSError, RecursionError, OverflowError) as error:
        raise UserError(f"not readable: {short(first_line(error))}") from error


def _read(folder: RunFolder) -> Run:
    config = folder.read_config()
    found = identity(config)
    seed = found.pop("seed", None)
    if type(seed) is not int:
        raise UserError("is no run folder: config.yaml holds no seed")
    summary = folder.read_summary()
    written = folder.summary_path.stat().st_mtime if summary else 0.0
    status = short(str(summary.get("status", "not begun")))
    if status == "running" and not is_held(folder):
        status = "interrupted"  # a killed run could not say so
    common: dict[str, Any] = {
        "folder": folder.path.name,
        "identity": found,
        "seed": seed,
        "written": written,
    }
    if status == "finished":
        return Run(**common, status=status, result=_result(summary, config))
    error = summary.get("error")
    return Run(
        **common,
        status=status + _progress(folder, found),
        error=None if error is None else short(str(error)),
    )


def _result(summary: dict[str, Any], config: dict[str, Any]) -> Result:
    """Raises UserError if a finished run's summary cannot be that of its configuration."""
    accuracy = {key: _number(summary, key) for key in METRICS}
    for key, value in accuracy.items():
        if value is None or not 0 <= value <= 100:
            raise UserError(
                f"summary.json: finished, but {key} is {summary.get(key)}, no percentage"
            )
    _check_order(accuracy)
    recipe = config.get("recipe")
    recipe = recipe if isinstance(recipe, dict) else {}
    epochs, steps = summary.get("epochs"), summary.get("steps")
    whole = recipe.get("epochs")
    if epochs != whole and (steps is None or steps != recipe.get("max_steps")):
        raise UserError(f"summary.json: finished, but after {epochs} of {whole} epochs")
    hardware, revision = summary.get("hardware"), summary.get("git_revision")
    return Result(
        accuracy={key: value for key, value in accuracy.items() if value is not None},
        seconds=_number(summary, "seconds"),
        devices=_whole(summary, "devices"),
        hardware=None if hardware is None else short(str(hardware)),
        parameters=_whole(summary, "parameters"),
        macs=_whole(summary, "macs"),
        revision=None if revision is None else short(str(revision)),
    )


def _check_order(accuracy: Mapping[str, float | None]) -> None:
    """Raises UserError for accuracies that no run can have together."""
    for greater, less in ORDERED:
        above, below = accuracy[greater], accuracy[less]
        assert above is not None and below is not None
        if above < below:
            raise UserError(f"summary.json: {greater}={above} must not be below {less}={below}")


def _number(summary: dict[str, Any], key: str) -> float | None:
    value = summary.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _whole(summary: dict[str, Any], key: str) -> int | None:
    value = summary.get(key)
    return value if type(value) is int else None


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
