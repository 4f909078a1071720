"""What a command says of its runs: a list before they start, and their tables at the end."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from reproduction.check import check
from reproduction.points import Point
from reproduction.studies.results import ON_TEST, Run, read_run
from reproduction.studies.runs_table import sweep_table
from reproduction.studies.study import PAPERS
from reproduction.studies.study_table import parts_of, study_table
from reproduction.studies.table import Table, as_markdown
from reproduction.studies.text import formatted
from reproduction.system import say
from reproduction.words import last_part

NOT_STARTED = "not started"


def conclude(points: Sequence[Point]) -> None:
    """Prints and writes the tables of a command, with their plots; the paper's also as a page.

    Then says how many runs are finished.
    """
    runs = [run_of(point) for point in points]
    begun = [run for run in runs if run.status != NOT_STARTED]
    outputs = Path(points[0].config.output_root)
    written = []
    if any(point.rows for point in points):
        written = conclude_studies(points, begun, outputs)
    elif any(run.status != "unusable" for run in begun):
        written = conclude_sweep(points, begun, outputs)
    if written:
        say(f"\nwritten to {', '.join(str(path) for path in written)}; .csv has the numbers")
    counts = Counter(run.status for run in runs)
    finished = counts.pop("finished", 0)
    others = [f", {count} {status}" for status, count in counts.items()]
    say(f"{finished} of {len(points)} runs are finished{''.join(others)}")


def run_of(point: Point) -> Run:
    """Returns what has become of a point; its folder may also hold another run."""
    folder = point.folder
    if folder.is_run():
        run = read_run(folder)
        is_ours = (run.row_hash, run.seed) == (point.row_hash, point.config.seed)
        if is_ours or run.status == "unusable":
            return run
    return Run(path=folder.path, status=NOT_STARTED, status_text=NOT_STARTED)


def conclude_sweep(points: Sequence[Point], runs: Sequence[Run], outputs: Path) -> list[Path]:
    """Prints the table of a sweep, and writes it with its plot."""
    from reproduction.studies.plots import draw_runs  # imports matplotlib

    table = sweep_table(points, runs)
    say_table(table)
    path = table.write(outputs)
    picture = path.with_suffix(".png")
    if draw_runs(table, picture):
        return [path, picture]
    return [path]


def conclude_studies(points: Sequence[Point], runs: Sequence[Run], outputs: Path) -> list[Path]:
    """Prints the tables of studies, and writes them; with rows of the paper, also their page."""
    parts = parts_of(points)
    tables = [study_table(part, runs, outputs) for part in parts]
    shown = [table for table in tables if table.counted.runs or table.extras]
    files = []
    for table in shown:
        say_table(table)
        files.append(table.write(outputs))
    if shown and any(part.name in PAPERS for part in parts):
        from reproduction.studies.page import write_page  # imports matplotlib and torch

        files.append(write_page(parts, tables, outputs))
    return files


def say_table(table: Table) -> None:
    say(f"\n# {table.title}\n\n{table.markdown(is_short=True)}")


# --- a dry run ----------------------------------------------------------------------------------


def listing(points: Sequence[Point]) -> str:
    """Returns a line for each run of a command, how many have which status, and their folders.

    What it lists starts: all points are checked, and what only this machine lacks is told.
    UserError for what cannot run.
    """
    rows, folders = [], []
    counts = Counter[str]()
    for task, point in enumerate(points):
        run = run_of(point)
        rows.append(
            {
                "task": str(task),
                "row": point.label or swept_text(point, points),
                "seed": str(point.config.seed),
                "status": run.status_text,
                "top-1 [%]": formatted(run.numbers.get(ON_TEST.name), ".2f"),
            }
        )
        folders.append(f"{task}: {run.path}")
        counts[run.status] += 1
    lacks = [f"not here: {text}" for text in check(points, is_dry=True)]
    total = "1 run" if len(points) == 1 else f"{len(points)} runs"
    each = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    table = as_markdown(pd.DataFrame(rows))
    return "\n".join([table, "", *folders, "", *lacks, f"{total}: {each}"])


def swept_text(point: Point, points: Sequence[Point]) -> str:
    """Returns what distinguishes a point of a sweep, but for its seed."""
    texts = []
    for word in point.words:
        key, _, value = word.partition("=")
        is_shared = all(word in other.words for other in points)
        if key != "seed" and not is_shared:
            texts.append(f"{last_part(key)}={value}")
    return ",".join(texts)
