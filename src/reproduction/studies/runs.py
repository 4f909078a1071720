"""All runs of a folder as one table, a row for each; every report, status and page reads it."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from reproduction.config import STACK
from reproduction.reporting.curves import epoch_means
from reproduction.runs.folder import RunFolder
from reproduction.runs.identity import differing, hash_of, identity, settings_of
from reproduction.runs.locking import status_of
from reproduction.studies.study import scales
from reproduction.system.errors import UserError, first_line, in_one_line
from reproduction.system.reading import parse_json

REPORT = "report"
# folders under outputs/ that are no runs, unless they hold one
NO_RUNS = (REPORT, "data", "benchmark", "check-gpu", "evaluations", "published")
METRICS = ("top1_last", "top1_median10", "top1_best", "top5_last", "top5_best")
# of runs with a validation split, beside top1_last and top5_last, see docs/data.md
SELECTED = ("val_top1_last", "val_top1_selected", "top1_selected", "top5_selected")
ORDERED = (  # pairs whose first metric is never below the second
    ("top1_best", "top1_last"),
    ("top1_best", "top1_median10"),
    ("top5_best", "top5_last"),
)
MIXING = ("mixed_share", "mixed_samples", "mixed_tokens")  # see Trainer._mixing
LAST_TEN = "top1_best10"  # the best of the last ten epochs that were evaluated
NUMBERS = (*METRICS, *SELECTED, LAST_TEN, *MIXING, "epochs", "seconds")
FACTS = ("devices", "hardware", "threads", "git_revision", "log")
WHOLE = ("seed", "devices")
COLUMNS = ("folder", "path", "key", "seed", "status", "error", "written", "settings", "planned")
MEDIAN_EPOCHS = 10  # as in training
LONGEST = 300  # characters of a text from a run folder
MOST_KEYS = 3  # that `closest` lists


def read_runs(*places: Path) -> pd.DataFrame:
    """Returns a row for each run folder among `places` or directly below them.

    `key` is the identity without the seed, `settings` holds the values by dotted key, `planned` the
    epochs of the recipe. METRICS and SELECTED, in percent, are of finished runs only. A folder that
    holds no run, or a damaged one, has the status `unusable` and the reason as its `error`.
    """
    rows = [_row(folder) for place in places for folder in _folders(place)]
    return _typed(pd.DataFrame(rows, columns=[*COLUMNS, *NUMBERS, *FACTS]))


def _typed(runs: pd.DataFrame) -> pd.DataFrame:
    """Makes numbers of columns that may be empty; whole numbers stay whole."""
    return runs.astype(dict.fromkeys(NUMBERS, "float") | dict.fromkeys(WHOLE, "Int64"))


def _folders(place: Path) -> Iterator[Path]:
    if not place.is_dir():
        raise UserError(f"{place}: there is no such folder of runs")
    if (place / "config.yaml").exists():
        yield place
        return
    for folder in sorted(entry for entry in place.iterdir() if entry.is_dir()):
        is_other = folder.name in (*NO_RUNS, *scales()) or folder.name.startswith(".")
        if not is_other or (folder / "config.yaml").exists():
            yield folder


def _row(path: Path) -> dict[str, Any]:
    row = {"folder": _short(path.name), "path": path}
    try:
        if not path.name.isprintable():
            raise UserError("its name cannot be printed")
        return row | _read(RunFolder(path))
    except UserError as error:
        reason = str(error).replace(f"{path}/", "").replace(f"{path} ", "")
    except (OSError, RecursionError, OverflowError, TypeError) as error:
        reason = f"not readable: {first_line(error)}"
    return row | {"status": "unusable", "error": _short(reason)}


def _read(folder: RunFolder) -> dict[str, Any]:
    """Raises UserError with the reason if the folder holds no run or a damaged one."""
    saved, summary = folder.read_config(), folder.read_summary()
    if type(saved.get("seed")) is not int:
        raise UserError("is not a run folder: config.yaml holds no seed")
    settings = settings_of(saved)
    status = status_of(folder, summary)
    error = summary.get("error") if status != "finished" else None
    row = {
        **facts_of(summary),
        "key": hash_of(saved | {"seed": 0}),
        "seed": settings.pop("seed", saved["seed"]),
        "status": status,
        "error": None if error is None else _short(str(error)),
        "written": folder.summary_path.stat().st_mtime if summary else 0.0,
        "settings": settings,
        "planned": saved.get("recipe", {}).get("epochs"),
    }
    if status == "finished":
        row |= _accuracies(summary, settings)
    return row


def facts_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Returns NUMBERS without accuracies, and FACTS, from a summary; None where it has none."""
    numbers = {key: number(summary.get(key)) for key in (*MIXING, "epochs", "seconds")}
    devices, threads, log = (summary.get(key) for key in ("devices", "threads", "log"))
    numbers[LAST_TEN] = _best_of_ten(log, numbers["epochs"])
    texts = {key: summary.get(key) for key in ("hardware", "git_revision")}
    return {
        **numbers,
        **{key: None if text is None else _short(str(text)) for key, text in texts.items()},
        "devices": devices if type(devices) is int else None,
        "threads": threads if type(threads) is int else None,
        "log": log if isinstance(log, list) else None,
    }


def _best_of_ten(log: Any, epochs: float | None) -> float | None:
    try:
        return max(float(x["top1"]) for x in log if x["epoch"] > (epochs or 0) - MEDIAN_EPOCHS)
    except (TypeError, KeyError, ValueError):
        return None


def _accuracies(summary: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, float]:
    """Raises UserError if the summary of a finished run contradicts itself or its configuration."""
    found: dict[str, float] = {}
    is_split = "selected_epoch" in summary
    for key in ("top1_last", "top5_last", *SELECTED) if is_split else METRICS:
        value = number(summary.get(key))
        if value is None or not 0 <= value <= 100:
            reason = f"finished, but {key} is {summary.get(key)}, no percentage"
            raise UserError(f"summary.json: {reason}")
        found[key] = value
    for greater, less in () if is_split else ORDERED:
        if found[greater] < found[less]:
            bound = f"{greater}={found[greater]} must not be below {less}={found[less]}"
            raise UserError(f"summary.json: {bound}")
    done, steps, epochs = summary.get("epochs"), summary.get("steps"), settings.get("recipe.epochs")
    if done != epochs and (steps is None or steps != settings.get("recipe.max_steps")):
        raise UserError(f"summary.json: finished, but after {done} of {epochs} epochs")
    return found


def number(value: Any) -> float | None:
    """Returns a finite number as a float, anything else as None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _short(text: str) -> str:
    return in_one_line(text, LONGEST)


def newest(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the finished run with the newest summary of each key and seed."""
    finished = runs[runs.status == "finished"].sort_values(["written", "folder"])
    return finished.drop_duplicates(["key", "seed"], keep="last").sort_values(["key", "seed"])


def left(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the runs that are not finished, without seeds of which another run is."""
    done = set(zip(*(newest(runs)[name] for name in ("key", "seed")), strict=True))
    open_runs = runs[~runs.status.isin(["finished", "unusable"])]
    is_open = [(run.key, run.seed) not in done for run in open_runs.itertuples()]
    return open_runs.loc[open_runs.index[is_open]].sort_values(["key", "seed", "folder"])


def state_text(run: Any) -> str:
    """Returns the status of a row, with its progress if it is not finished."""
    if run.status in ("finished", "not started") or pd.isna(run.epochs):
        return str(run.status)
    return f"{run.status} after epoch {run.epochs:.0f} of {run.planned}"


def stack_of(settings: Mapping[str, Any]) -> str:
    """Returns the augmentations of a run, such as `mixup+htm`, or `none`."""
    used = [x for x in STACK if any(key.startswith(f"augmentation.{x}.") for key in settings)]
    return "+".join(used) or "none"


def closest(run: Any, settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Says how a run differs from the settings (by name) that are closest to its own."""
    ours = identity(run.settings)
    gaps = ((differing(ours, identity(theirs)), name) for name, theirs in settings.items())
    pairs, name = min(gaps, key=lambda gap: len(gap[0]), default=([], None))
    reason = f"{state_text(run)}, no row of the paper at this scale"
    if 0 < len(pairs) <= MOST_KEYS:
        reason += f": differs from {name} in {', '.join(pairs)}"
    return _short(reason)


def upgrade(folder: RunFolder) -> bool:
    """Adds what training has written into summary.json since 0.2.0, from metrics.jsonl.

    Returns whether it did: not for runs that have it or are not finished. UserError if the metrics
    cannot be read.
    """
    summary = folder.read_summary()
    if summary.get("status") != "finished" or "log" in summary:
        return False
    steps, epochs = folder.read_metrics()
    steps = [line for line in steps if not line.get("skipped")]
    if not steps:
        raise UserError(f"{folder.metrics_path}: holds no batches")
    time = folder.summary_path.stat().st_mtime
    try:
        last = epoch_means([line for line in steps if line["epoch"] == steps[-1]["epoch"]])
        size = summary["images"] / summary["steps"] if "images" in summary else None
        mean = sum(line["mixed_samples"] for line in steps) / len(steps)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"{folder.metrics_path}: not readable: {first_line(error)}") from error
    share = None if size is None else round(mean / size, 4)
    mixing = {"mixed_samples": last.mixed_samples, "mixed_tokens": last.mixed_tokens}
    folder.write_summary(**mixing, mixed_share=share, log=epochs)
    os.utime(folder.summary_path, (time, time))  # the newest run of a seed counts
    return True


def read_store(folder: Path) -> pd.DataFrame:
    """Returns the published runs of results/*.jsonl in the form of `read_runs`, with `hours`."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for place, line in enumerate(path.read_text().splitlines(), 1):
            try:
                rows.append(_published(parse_json(line)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{path}:{place}: no result: {first_line(error)}") from error
    return _typed(pd.DataFrame(rows, columns=[*COLUMNS, *NUMBERS, *FACTS, "hash", "hours"]))


def _published(result: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **facts_of(result),
        **{key: float(result[key]) for key in METRICS},
        "folder": result["name"],
        "key": hash_of(result["config"] | {"seed": 0}),
        "seed": int(result["seed"]),
        "status": "finished",
        "written": 0.0,
        "hash": result["hash"],
        "hours": float(result["hours"]),
        "seconds": 3600 * float(result["hours"]),
        "settings": result["config"],
    }


def as_json(value: Any) -> Any:
    """Returns plain values, with infinities as text, as in results/."""
    infinities = {"Infinity": "inf", "-Infinity": "-inf"}
    return json.loads(json.dumps(value), parse_constant=infinities.__getitem__)
