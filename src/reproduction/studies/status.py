"""The progress of planned runs, read from their folders."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pandas as pd

from reproduction.studies.plan import PlannedRun
from reproduction.studies.runs import read_runs

NOT_STARTED = "not started"


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
    """Returns a line for each run; hours are measured, `~` marks those of other seeds."""
    table = states(planned)
    rows = [_row(run, table, with_folders) for run in table.itertuples()]
    align = ["left", "right", "left", *["right"] * 3, "left"][: len(rows[0])]
    text = pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True, colalign=align)
    return f"{text}\n\n{counted(table.status)}"


def counted(statuses: Sequence[str]) -> str:
    """Returns `5 runs: 3 finished, 2 not started`."""
    counts = ", ".join(f"{n} {status}" for status, n in Counter(statuses).most_common())
    return f"{len(statuses)} run{'s' * (len(statuses) != 1)}: {counts}"


def _row(run: Any, table: pd.DataFrame, with_folders: bool) -> dict[str, str]:
    done = 0 if pd.isna(run.epochs) else int(run.epochs)
    last = run.log[-1] if isinstance(run.log, list) and run.log else {}
    top1 = last.get("top1", run.top1_last)  # with a validation split known at the end only
    row = {
        "run": ", ".join(run.labels),
        "seed": str(run.seed),
        "status": run.status if pd.isna(run.error) else f"{run.status}: {run.error}",
        "epochs": f"{done}/{run.planned}",
        "top-1": "" if pd.isna(top1) else f"{top1:.2f}",
        "hours": _hours(run, table),
    }
    return row | ({"folder": run.folder} if with_folders else {})


def _hours(run: Any, table: pd.DataFrame) -> str:
    if run.status == "finished" and not pd.isna(run.seconds):
        return f"{run.seconds / 3600:.3g}"
    same = table[(table.status == "finished") & (table.labels == run.labels)].seconds.dropna()
    return f"~{fmean(same) / 3600:.3g}" if len(same) else ""
