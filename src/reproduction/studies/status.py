"""The progress of planned runs, read from their folders."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pandas as pd

from reproduction.studies.plan import PlannedRun
from reproduction.studies.results import short_revision
from reproduction.studies.runs import read_runs
from reproduction.studies.table import as_markdown

NOT_STARTED = "not started"
TERMINAL_COLUMNS = ("rows", "seed", "status", "epochs", "top-1", "hours")  # columns for a terminal


def states(planned: Sequence[PlannedRun]) -> pd.DataFrame:
    """Returns the rows of `read_runs` in the order of the plan, with `labels` and `folder`.

    A run without a folder has the status `not started`.
    """
    paths = [run.folder.path for run in planned]
    runs = read_runs(*(path for path in paths if (path / "config.yaml").exists()))
    found = {run.path: run._asdict() for run in runs.itertuples(index=False)}
    rows = [
        {
            "status": NOT_STARTED,
            **found.get(run.folder.path, {}),
            "labels": run.labels,
            "seed": run.config.seed,
            "planned": run.config.recipe.epochs,
            "folder": str(run.folder.path),
        }
        for run in planned
    ]
    return pd.DataFrame(rows, columns=[*runs.columns, "labels"])


def state_table(planned: Sequence[PlannedRun], with_folders: bool) -> str:
    """Returns a line for each run, and how many have which status."""
    table = states(planned)
    texts = listing(table)[[*TERMINAL_COLUMNS, *(["folder"] if with_folders else [])]]
    counts = ", ".join(f"{n} {status}" for status, n in Counter(table.status).most_common())
    number = f"{len(table)} run{'s' * (len(table) != 1)}"
    return f"{as_markdown(texts)}\n\n{number}: {counts}"


def listing(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns runs with their `labels` as text; `~` marks hours of other seeds."""
    return pd.DataFrame(
        {
            "rows": [", ".join(labels) for labels in runs.labels],
            "seed": runs.seed.map(str),
            "status": [x.status + _text(x.error, ": {}") for x in runs.itertuples()],
            "epochs": [f"{_text(x.epochs, '{:.0f}') or 0}/{x.planned}" for x in runs.itertuples()],
            "top-1": [_text(_top1(x), "{:.2f}") for x in runs.itertuples()],
            "best": [_text(x, "{:.2f}") for x in runs.top1_best],
            "hours": [_hours(x, runs) for x in runs.itertuples()],
            "hardware": [_text(x, "{}") for x in runs.hardware],
            "git": ["" if pd.isna(x) else short_revision(x) for x in runs.git_revision],
            "folder": runs.folder,
        }
    )


def _text(value: Any, form: str) -> str:
    return "" if pd.isna(value) else form.format(value)


def _top1(run: Any) -> float:
    """Returns the accuracy of the last evaluated epoch."""
    last = run.log[-1] if isinstance(run.log, list) and run.log else {}
    return last.get("top1", run.top1_last)  # with a validation split known at the end only


def _hours(run: Any, runs: pd.DataFrame) -> str:
    if run.status == "finished" and not pd.isna(run.seconds):
        return f"{run.seconds / 3600:.3g}"
    done = runs[(runs.status == "finished") & (runs.labels.map(str) == str(run.labels))].seconds
    done = done.dropna()
    return f"~{fmean(done) / 3600:.3g}" if len(done) else ""
