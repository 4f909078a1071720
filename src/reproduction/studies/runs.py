"""All runs of a folder as one table, a row for each; every report, status and page reads it."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import pandas as pd

from reproduction.config import STACK
from reproduction.runs.folder import RunFolder
from reproduction.runs.identity import hash_of, settings_of
from reproduction.runs.locking import status_of
from reproduction.studies.study import scales
from reproduction.system.errors import UserError, first_line, in_one_line
from reproduction.system.reading import parse_json
from reproduction.training.history import MEDIAN_EPOCHS, MIXING

REPORT = "report"
# folders under outputs/ that are no runs, unless they hold one
NO_RUNS = (REPORT, "data", "benchmark", "check-gpu", "on-gpu", "evaluations", "published")
METRICS = ("top1_last", "top1_median10", "top1_best", "top5_last", "top5_best")
# of runs with a validation split, beside top1_last and top5_last, see docs/data.md
SELECTED = ("val_top1_last", "val_top1_selected", "top1_selected", "top5_selected")
LAST_TEN = "top1_best10"  # the best of the last ten epochs that were evaluated
PROGRESS = ("epochs", "seconds")
NUMBERS = (*METRICS, *SELECTED, LAST_TEN, *MIXING, *PROGRESS)
FACTS = ("devices", "hardware", "threads", "git_revision")
WHOLE = ("seed", "devices", "threads", "planned")
COLUMNS = (
    "folder",
    "path",
    "key",
    "seed",
    "status",
    "error",
    "written",
    "settings",
    "planned",
    "log",
)
LONGEST = 300  # characters of a text from a run folder


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
    row: dict[str, Any] = {"folder": _short(path.name), "path": path}
    try:
        if not path.name.isprintable():
            raise UserError("its name cannot be printed")
        folder = RunFolder(path)
        saved, summary = folder.read_config(), folder.read_summary()
        if type(saved.get("seed")) is not int:
            raise UserError("is not a run folder: config.yaml holds no seed")
        status, settings = status_of(folder, summary), settings_of(saved)
        is_finished, error = status == "finished", summary.get("error")
        if is_finished:
            _check(summary)
        names = NUMBERS if is_finished else (*MIXING, *PROGRESS)
        log, facts = summary.get("log"), {key: summary.get(key) for key in FACTS}
        return {
            **row,
            **{key: x for key in names if is_number(x := summary.get(key))},
            **{key: _short(str(x)) for key, x in facts.items() if isinstance(x, str)},
            **{key: x for key, x in facts.items() if type(x) is int},
            "log": log if isinstance(log, list) else None,
            LAST_TEN: _best_of_ten(summary),
            "key": hash_of(saved | {"seed": 0}),
            "seed": settings.pop("seed", saved["seed"]),
            "status": status,
            "error": None if is_finished or error is None else _short(str(error)),
            "written": folder.summary_path.stat().st_mtime if summary else 0.0,
            "settings": settings,
            "planned": x if type(x := saved.get("recipe", {}).get("epochs")) is int else None,
        }
    except UserError as error:
        reason = str(error).replace(f"{path}/", "").replace(f"{path} ", "")
    except (OSError, RecursionError, OverflowError, TypeError) as error:
        reason = f"not readable: {first_line(error)}"
    return row | {"status": "unusable", "error": _short(reason)}


def _best_of_ten(summary: Mapping[str, Any]) -> float | None:
    try:
        first = summary["epochs"] - MEDIAN_EPOCHS
        return max(float(x["top1"]) for x in summary["log"] if x["epoch"] > first)
    except (TypeError, KeyError, ValueError):
        return None


def _check(summary: Mapping[str, Any]) -> None:
    """Raises UserError if the summary of a finished run lacks an accuracy."""
    for key in SELECTED if "selected_epoch" in summary else METRICS:
        if not is_number(value := summary.get(key)):
            raise UserError(f"summary.json: finished, but {key} is {value}, no number")


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def _short(text: str) -> str:
    return in_one_line(text, LONGEST)


def newest(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the finished run with the newest summary of each key and seed."""
    finished = runs[runs.status == "finished"].sort_values(["written", "folder"])
    return finished.drop_duplicates(["key", "seed"], keep="last").sort_values(["key", "seed"])


def left(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the runs that are not finished, without seeds of which another run is."""
    done = {(run.key, run.seed) for run in newest(runs).itertuples()}
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


def _published(line: Mapping[str, Any]) -> dict[str, Any]:
    settings = from_json(line["config"])
    return {
        **{key: line.get(key) for key in (*MIXING, *FACTS, "epochs", "log")},
        **{key: float(line[key]) for key in METRICS},
        LAST_TEN: _best_of_ten(line),
        "folder": line["name"],
        "key": line.get("key") or hash_of(settings | {"seed": 0}),
        "seed": int(line["seed"]),
        "status": "finished",
        "written": 0.0,
        "hash": line["hash"],
        "hours": float(line["hours"]),
        "seconds": 3600 * float(line["hours"]),
        "settings": settings,
    }


def as_json(value: Any) -> Any:
    """Returns plain values, with infinities as text, as in results/."""
    infinities = {"Infinity": "inf", "-Infinity": "-inf"}
    return json.loads(json.dumps(value), parse_constant=infinities.__getitem__)


def from_json(value: Any) -> Any:
    """Undoes `as_json`; the text inf becomes infinity, too."""
    if isinstance(value, dict):
        return {key: from_json(each) for key, each in value.items()}
    if isinstance(value, list):
        return [from_json(each) for each in value]
    return float(value) if value in ("inf", "-inf") else value
