"""What a command says of its runs: a list before they start, and their tables at the end."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from reproduction.compose import Point
from reproduction.studies.results import ON_TEST, Run
from reproduction.studies.runs_table import sweep_table
from reproduction.studies.study import PAPERS, Part
from reproduction.studies.study_table import study_table
from reproduction.studies.table import Table, as_markdown
from reproduction.studies.text import formatted
from reproduction.system import say


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


def conclude_studies(parts: Sequence[Part], runs: Sequence[Run], outputs: Path) -> list[Path]:
    """Prints the tables of studies, and writes them; with rows of the paper, also their page."""
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


def list_of_runs(runs: Sequence[Run], labels: Sequence[str], seeds: Sequence[int]) -> str:
    """Returns the table of a dry run."""
    rows = []
    for task, (run, label, seed) in enumerate(zip(runs, labels, seeds, strict=True)):
        top1 = formatted(run.numbers.get(ON_TEST.name), ".2f")
        row = {"task": str(task), "row": label, "seed": str(seed), "status": run.status_text}
        rows.append({**row, "top-1 [%]": top1})
    return as_markdown(pd.DataFrame(rows))
