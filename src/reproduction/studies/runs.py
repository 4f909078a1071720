"""All runs of a folder as one table, a row for each; every report, status and page reads it."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from reproduction.config import STACK
from reproduction.runs.folder import RunFolder
from reproduction.runs.identity import differing_data, hash_of, nested, settings_of
from reproduction.runs.locking import status_of
from reproduction.studies.columns import MEASURES, METRICS, SELECTED, is_number, measured
from reproduction.studies.study import scales
from reproduction.system.errors import UserError, first_line, in_one_line
from tokenmixup.settings import AUTO

REPORT = "report"
# folders under outputs/ that are no runs, unless they hold one
NO_RUNS = (REPORT, "data", "check-gpu", "evaluations", "published")
FACTS = ("devices", "hardware", "threads", "git_revision")
WHOLE = ("seed", "devices", "threads", "planned")
RUN_COLUMNS = (
    *("folder", "path", "key", "seed", "status", "error", "written"),
    *("settings", "planned", "log", "epochs", "data", *MEASURES, *FACTS),
)
OTHER_DATA = "other data"  # status of a finished run that is not averaged
LONGEST_TEXT = 300  # characters of a text from a run folder


def read_runs(*places: Path) -> pd.DataFrame:
    """Returns a row for each run folder among `places` or directly below them.

    `key` is the identity without the seed, `settings` holds the values by dotted key, `auto` with
    its number, `planned` the epochs of the recipe. Only finished runs have MEASURES. A folder that
    holds no run, or a damaged one, has the status `unusable` and the reason as its `error`; a
    finished one OTHER_DATA, if the newest of its configuration was trained on others.
    """
    rows = [_row(folder) for place in places for folder in _folders(place)]
    _tell_data_apart(rows)
    return _frame(rows)


def _tell_data_apart(rows: list[dict[str, Any]]) -> None:
    """Compares the data of finished runs: those of the newest of a configuration count.

    Where configurations had different images from one place, the setting `dataset.images` says so.
    """
    finished = [x for x in rows if x["status"] == "finished" and isinstance(x["data"], dict)]
    now = {row["key"]: row["data"] for row in sorted(finished, key=lambda row: row["written"])}
    images = defaultdict(set)
    for row in finished:
        if gap := differing_data(row["data"], now[row["key"]]):
            row |= {"status": OTHER_DATA, "error": _short(f"left out, other data: {gap}")}
        images[_place(row)].add(now[row["key"]].get("images"))
    for row in rows:
        if (data := now.get(row.get("key"))) and len(images[_place(row)]) > 1:
            row["settings"]["dataset.images"] = data.get("images")


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row["settings"].get(f"dataset.{key}") for key in ("name", "root", "source"))


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Makes numbers of columns that may be empty; whole numbers stay whole."""
    types = dict.fromkeys((*MEASURES, "epochs"), "float") | dict.fromkeys(WHOLE, "Int64")
    return pd.DataFrame(rows, columns=[*RUN_COLUMNS]).astype(types)


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
    row = {"folder": in_one_line(path.name, LONGEST_TEXT), "path": path}
    folder = RunFolder(path)
    try:
        saved, summary = folder.read_config(), folder.read_summary()
        if type(saved.get("seed")) is not int:
            raise UserError("is not a run folder: config.yaml holds no seed")
        status, settings = status_of(folder, summary), settings_of(saved)
        is_finished = status == "finished"
        for key in (SELECTED if "selected_epoch" in summary else METRICS) if is_finished else ():
            if not is_number(value := summary.get(key)):
                raise UserError(f"summary.json: finished, but {key} is {value}, no number")
        for name, numbers in summary.get("htm", {}).items():
            if settings.get(key := f"augmentation.htm.{name}") == AUTO:
                settings[key] = f"{AUTO} ({', '.join(dict.fromkeys(f'{x:g}' for x in numbers))})"
        return row | {
            **{key: summary.get(key) for key in ("log", "epochs", "data", *FACTS)},
            **(measured(summary) if is_finished else {}),
            "key": hash_of(saved | {"seed": 0}),
            "seed": settings.pop("seed"),
            "status": status,
            "error": None if is_finished else _short(summary.get("error")),
            "written": folder.summary_path.stat().st_mtime if summary else 0.0,
            "settings": settings,
            "planned": settings.get("recipe.epochs"),
        }
    except UserError as error:
        reason = str(error).replace(f"{path}/", "").replace(f"{path} ", "")
    except (OSError, OverflowError, TypeError, ValueError) as error:
        reason = f"not readable: {first_line(error)}"
    return row | {"status": "unusable", "error": _short(reason)}


def _short(text: Any) -> str | None:
    return None if text is None else in_one_line(str(text), LONGEST_TEXT)


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
    if run.status in ("finished", "not started", OTHER_DATA) or pd.isna(run.epochs):
        return str(run.status)
    return f"{run.status} after epoch {run.epochs:.0f} of {run.planned}"


def stack_of(settings: Mapping[str, Any]) -> str:
    """Returns the augmentations of a run, such as `mixup+htm`, or `none`."""
    used = [x for x in STACK if any(key.startswith(f"augmentation.{x}.") for key in settings)]
    return "+".join(used) or "none"


def read_store(folder: Path) -> pd.DataFrame:
    """Returns the published runs of results/*.jsonl in the form of `read_runs`, with `hash`."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for place, text in enumerate(path.read_text().splitlines(), 1):
            try:
                line = json.loads(text)
                rows.append(_published(line) | {"hash": line["hash"]})
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{path}:{place}: no result: {first_line(error)}") from error
    return _frame(rows).assign(hash=[row["hash"] for row in rows])


def _published(line: Mapping[str, Any]) -> dict[str, Any]:
    settings = from_json(line["config"])
    # publish.py leaves absolute paths out
    lacks_path = settings.get("dataset.root", "") is None or settings.get("model.weights")
    return {
        **{key: line.get(key) for key in ("log", "epochs", *FACTS)},
        **measured({**line, "seconds": 3600 * line["hours"]}),
        "folder": line["name"],
        "key": line["key"] if lacks_path else hash_of(nested(settings | {"seed": 0})),
        "seed": line["seed"],
        "status": "finished",
        "written": 0.0,
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
