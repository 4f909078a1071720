"""What a plan says: its list before it starts, and what it ends with, whoever has trained it."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from reproduction.check import check
from reproduction.points import Point
from reproduction.studies.results import ON_TEST, Run, read_run
from reproduction.studies.runs_table import sweep_table
from reproduction.studies.study import PAPERS
from reproduction.studies.study_table import planned, study_table
from reproduction.studies.table import Table, markdown
from reproduction.studies.text import NOTHING, number
from reproduction.system import say
from reproduction.words import last_part

NOT_STARTED = "not started"


def conclude(points: Sequence[Point]) -> None:
    """Prints the tables of a plan, and writes them with their plots, and the paper's page.

    What is not finished is counted.
    """
    runs = runs_of(points)
    outputs = Path(points[0].config.output_root)
    written = []
    if any(point.rows for point in points):
        written = conclude_studies(points, runs, outputs)
    elif any(run.status != "unusable" for run in runs):
        written = conclude_sweep(points, runs, outputs)
    if written:
        say(f"\nwritten to {', '.join(str(path) for path in written)}")
    counts = Counter(run.status for run in runs)
    counts[NOT_STARTED] = len(points) - len(runs)
    finished = counts.pop("finished", 0)
    others = [f", {number} {status}" for status, number in counts.items() if number > 0]
    say(f"{finished} of {len(points)} runs are finished{''.join(others)}")


def runs_of(points: Sequence[Point]) -> list[Run]:
    """Returns the runs that have begun."""
    found = []
    for point in points:
        if point.folder.is_run():
            run = read_run(point.folder)
            is_other = run.key and (run.key, run.seed) != (point.row_hash, point.config.seed)
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
    begun = [table for table in tables if table.counted.runs or table.extras]
    files = []
    for table in begun:
        say_table(table)
        files.append(table.write(outputs)[0])
    if begun and any(plan.name in PAPERS for plan in plans):
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
    rows, folders = [], []
    counts = Counter[str]()
    for task, point in enumerate(points):
        path = point.folder.path
        row = {
            "task": str(task),
            "row": point.label or swept_text(point, points),
            "seed": str(point.config.seed),
            "status": NOT_STARTED,
            "top-1 [%]": NOTHING,
        }
        status = NOT_STARTED
        if path in runs:
            status = runs[path].status
            row["status"] = runs[path].state
            row["top-1 [%]"] = number(runs[path].numbers.get(ON_TEST), ".2f")
        rows.append(row)
        folders.append(f"{task}: {path}")
        counts[status] += 1
    lacks = [f"not here: {text}" for text in check(points, is_dry=True)]
    total = "1 run" if len(points) == 1 else f"{len(points)} runs"
    each = ", ".join(f"{n} {status}" for status, n in counts.most_common())
    return "\n".join([markdown(pd.DataFrame(rows)), "", *folders, "", *lacks, f"{total}: {each}"])


def swept_text(point: Point, points: Sequence[Point]) -> str:
    """Returns what distinguishes a point of a sweep, but for its seed."""
    texts = []
    for word in point.words:
        key, _, value = word.partition("=")
        if key != "seed" and not all(word in other.words for other in points):
            texts.append(f"{last_part(key)}={value}")
    return ",".join(texts)
