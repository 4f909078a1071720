"""What is said at the end of a sweep: one table of its runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reproduction.start import Point
from reproduction.studies.study import studies
from reproduction.system import say


def conclude(points: Sequence[Point]) -> None:
    """Prints the table of the runs that have begun, and where it and its plot are written."""
    from reproduction.studies.plots import write_sweep

    if folders := [x.folder.path for x in points if x.folder.config_path.exists()]:
        table, files = write_sweep(folders, folders[0].parent)
        say(f"\n{table}\nwritten to {', '.join(map(str, files))}")
    done = sum(x.folder.is_finished() for x in points)
    say(f"{done} of {len(points)} runs are finished")


def conclude_study(points: Sequence[Point], plan: Any, words: Sequence[str]) -> None:
    """Prints the runs of a study, and of one of your own where its table is written."""
    from reproduction.studies.table import listing, read_runs, study_table

    say(listing(points))
    outputs = Path(points[0].config.output_root)
    if str(plan.study).endswith(".yaml") and outputs.is_dir():
        for name, study in studies(str(plan.study)).items():
            trained = replace(study, seeds=plan.seeds or study.seeds)
            table = study_table(name, trained, read_runs(outputs), plan.scale, words)
            say(f"report: {table.write(outputs)[0]}")
