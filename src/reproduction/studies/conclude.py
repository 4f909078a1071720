"""What a plan says: its list before it starts, and what it ends with, whoever has trained it."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from reproduction.check import check
from reproduction.start import Point
from reproduction.studies.results import ON_TEST, Run, read_run
from reproduction.studies.study import PAPERS
from reproduction.studies.tables import planned, study_table, sweep_table
from reproduction.studies.text import Table, markdown, number
from reproduction.system import say

NOT_STARTED = "not started"


def conclude(points: Sequence[Point]) -> None:
    """Prints the tables of a plan, and writes them with their plots, and the paper's page.

    What has not begun is counted.
    """
    runs = runs_of(points)
    if runs:
        outputs = Path(points[0].config.output_root)
        written = conclude_studies(points, runs, outputs) or conclude_sweep(points, runs, outputs)
        say(f"\nwritten to {', '.join(map(str, written))}")
    finished = sum(run.status == "finished" for run in runs)
    others = Counter(run.status for run in runs if run.status != "finished")
    if len(runs) < len(points):
        others[NOT_STARTED] = len(points) - len(runs)
    rest = "".join(f", {number} {status}" for status, number in others.items())
    say(f"{finished} of {len(points)} runs are finished{rest}")


def runs_of(points: Sequence[Point]) -> list[Run]:
    """Returns the runs that have begun."""
    found = []
    for point in points:
        if point.folder.config_path.exists():
            run = read_run(point.folder)
            is_other = run.key and (run.key, run.seed) != (point.key, point.config.seed)
            if not is_other:
                found.append(run)
    return found


def conclude_sweep(points: Sequence[Point], runs: Sequence[Run], outputs: Path) -> list[Path]:
    """Prints the table of a sweep, and writes it with its plot."""
    from reproduction.studies.plots import draw_runs  # imports matplotlib

    table = sweep_table(points, runs)
    say_table(table)
    files = table.write(outputs)
    picture = files[0].with_suffix(".png")
    if draw_runs(table, picture):
        files.append(picture)
    return files


def conclude_studies(points: Sequence[Point], runs: Sequence[Run], outputs: Path) -> list[Path]:
    """Prints the tables of studies, and writes them; with rows of the paper, also their page."""
    plans = planned(points)
    tables = [study_table(plan, runs, outputs) for plan in plans]
    files = []
    for table in tables:
        if table.counted.runs or table.extras:
            say_table(table)
            files.append(table.write(outputs)[0])
    if any(plan.name in PAPERS for plan in plans):
        from reproduction.studies.page import write_page  # imports matplotlib and torch

        files.append(write_page(plans, tables, outputs))
    return files


def say_table(table: Table) -> None:
    say("\n".join([f"\n# {table.title}\n", *table.lines(is_short=True)]))


# --- a dry run ----------------------------------------------------------------------------------


def listing(points: Sequence[Point]) -> str:
    """Returns a line for each run of a plan, how many have which status, and their folders.

    What it lists starts: all points are checked, and what only this machine lacks is told.
    UserError for what cannot run.
    """
    runs = {run.path: run for run in runs_of(points)}
    rows, counts = [], Counter[str]()
    for place, point in enumerate(points):
        run = runs.get(point.folder.path)
        state, top1 = NOT_STARTED, None
        if run is not None:
            state, top1 = run.state, run.numbers.get(ON_TEST)
        counts[run.status if run is not None else NOT_STARTED] += 1
        rows.append(
            {
                "task": str(place),
                "row": point.label or swept_text(point, points),
                "seed": str(point.config.seed),
                "status": state,
                "top-1 [%]": number(top1, ".2f"),
            }
        )
    folders = [f"{place}: {point.folder.path}" for place, point in enumerate(points)]
    lacks = [f"not here: {text}" for text in check(points, is_dry=True)]
    total = ", ".join(f"{n} {status}" for status, n in counts.most_common())
    texts = [markdown(pd.DataFrame(rows)), "", *folders, "", *lacks]
    plural = "" if len(rows) == 1 else "s"
    return "\n".join([*texts, f"{len(rows)} run{plural}: {total}"])


def swept_text(point: Point, points: Sequence[Point]) -> str:
    """Returns what distinguishes a point of a sweep, but for its seed."""
    texts = []
    for word in point.words:
        key, _, value = word.partition("=")
        if key != "seed" and not all(word in other.words for other in points):
            texts.append(f"{key.rpartition('.')[2]}={value}")
    return ",".join(texts)
