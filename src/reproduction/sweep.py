"""A command of several runs as one object, from its words to its table.

A sweeper makes it. What it knows then, the points, the studies whose rows they are, and where it
writes, it has at the end; nothing is read a second time.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from reproduction.check import check
from reproduction.compose import Point, expand, last_part, planned_point, readable
from reproduction.config import StudyWords
from reproduction.help import key_of
from reproduction.identity import row_hash
from reproduction.studies.study import PAPERS, Part, planned
from reproduction.system import OneLineError, UserError, program, say, warn

if TYPE_CHECKING:  # imports pandas
    from reproduction.studies.results import Run

NOT_STARTED = "not started"
# sweepers that try every value and choose none: they need no validation split
GRIDS = ("hydra_plugins.checked.", "hydra._internal.core_plugins.basic_sweeper.")


@dataclass(frozen=True)
class Sweep:
    """Points in their order, and the studies that they are the runs of; none, of swept keys."""

    points: list[Point]
    parts: list[Part] = field(default_factory=list)
    is_whole: bool = True  # all points that the words name are here: there will be a table

    @classmethod
    def over_keys(cls, words: Sequence[str]) -> "Sweep":
        """Every value of these words by every other."""
        return cls([planned_point(each) for each in expand(words)])

    @classmethod
    def of_study(cls, own: StudyWords, words: Sequence[str]) -> "Sweep":
        """The runs of a study, with `words` as overrides of all of them."""
        words = [readable(word) for word in words]
        for word in words:
            if key_of(word) == "seed":
                raise UserError(f"{word}: must be seeds=N, from the study's first_seed on")
        return cls(*planned(own.study, own.seeds, own.scale, words))

    def only(self, task: int | None) -> "Sweep":
        """The point of this number alone; all of them for None."""
        if task is None:
            return self
        if task >= len(self.points):
            raise UserError(f"task={task}: must be 0 to {len(self.points) - 1}")
        return replace(self, points=[self.points[task]], is_whole=False)

    def check(self) -> None:
        """Raises UserError for a point that cannot run, before the first one starts."""
        check(self.points)

    def conclude(self, errors: Sequence[OneLineError]) -> None:
        """Tells errors, writes the tables, and ends the program unless all runs are finished."""
        for error in errors:
            warn(f"{program()}: {error}")
        runs = self.write_tables()
        if errors or any(run.status != "finished" for run in runs):
            sys.exit(max((error.status for error in errors), default=1))

    def write_tables(self) -> list["Run"]:
        """Prints and writes the tables, and says what has become of the runs, which it returns.

        Their folders tell it. Where only one of the points is trained there is no table.
        """
        runs = [run_of(point) for point in self.points]
        if not self.is_whole:
            return runs
        written = self._write([run for run in runs if run.status != NOT_STARTED])
        if written:
            say(f"\nwritten to {', '.join(map(str, written))}; .csv has the numbers")
        counts = Counter(run.status for run in runs)
        finished = counts.pop("finished", 0)
        others = [f", {count} {status}" for status, count in counts.items()]
        say(f"{finished} of {len(runs)} runs are finished{''.join(others)}")
        return runs

    def _write(self, begun: Sequence["Run"]) -> list[Path]:
        """Prints and writes the tables of the runs that have begun, and returns their files."""
        from reproduction.studies.plots import draw_runs  # imports matplotlib
        from reproduction.studies.rows import study_table, sweep_table

        outputs = Path(self.points[0].config.output_root)
        tables = [study_table(part, begun, outputs) for part in self.parts]
        if not self.parts and any(run.status != "unusable" for run in begun):
            tables = [sweep_table(self.points, begun)]
        files = []
        for table in tables:
            if table.counted.runs or table.extras or not self.parts:
                say(f"\n# {table.title}\n\n{table.markdown(is_short=True)}")
                files.append(table.write(outputs))
                if not self.parts and draw_runs(table, files[0].with_suffix(".png")):
                    files.append(files[0].with_suffix(".png"))
        if files and any(part.name in PAPERS for part in self.parts):
            from reproduction.studies.page import write_page  # imports torch

            files.append(write_page(self.parts, tables, outputs))
        return files

    def listing(self) -> str:
        """Returns a line for each run, how many have which status, and their folders.

        What it lists starts: all points are checked, and what only this machine lacks is told.
        UserError for what cannot run.
        """
        import pandas as pd

        from reproduction.studies.results import ON_TEST
        from reproduction.studies.table import as_markdown
        from reproduction.studies.text import formatted

        shared = set.intersection(*({*point.words} for point in self.points))
        rows, folders = [], []
        counts = Counter[str]()
        for task, point in enumerate(self.points):
            run = run_of(point)
            row = {
                "task": str(task),
                "row": point.label or swept_text(point, shared),
                "seed": str(point.config.seed),
                "status": run.status_text,
                "top-1 [%]": formatted(run.numbers.get(ON_TEST.name), ".2f"),
            }
            rows.append(row)
            folders.append(f"{task}: {run.path}")
            counts[run.status] += 1
        lacks = [f"not here: {text}" for text in check(self.points, is_dry=True)]
        total = "1 run" if len(rows) == 1 else f"{len(rows)} runs"
        each = ", ".join(f"{count} {status}" for status, count in counts.most_common())
        table = as_markdown(pd.DataFrame(rows))
        return "\n".join([table, "", *folders, "", *lacks, f"{total}: {each}"])


def swept_text(point: Point, shared: set[str]) -> str:
    """Returns what distinguishes a point of a sweep, but for its seed."""
    texts = []
    for word in point.words:
        key, _, value = word.partition("=")
        if key != "seed" and word not in shared:
            texts.append(f"{last_part(key)}={value}")
    return ",".join(texts)


def run_of(point: Point) -> "Run":
    """Returns what has become of a point; its folder may also hold another run."""
    from reproduction.studies.results import Run, read_run

    folder = point.folder
    if folder.is_run():
        run = read_run(folder)
        is_ours = (run.row_hash, run.seed) == (row_hash(point.config), point.config.seed)
        if is_ours or run.status == "unusable":
            return run
    return Run(path=folder.path, status=NOT_STARTED, status_text=NOT_STARTED)


def check_choice(points: Sequence[Point], sweeper: str) -> None:
    """Raises UserError if a sweeper that chooses settings would choose them on the test set."""
    from reproduction.data.sources import opened  # imports torch

    if sweeper.startswith(GRIDS):
        return
    for point in points:
        if opened(point.config.dataset).validation is None:
            reason = "chooses settings, and so needs a validation split: dataset.validation=0.1"
            raise UserError(f"hydra.sweeper={sweeper}: {reason}")
