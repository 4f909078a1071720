"""The table of a study: its rows with what is printed of them, its looks, its latencies."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path

import pandas as pd

from reproduction.identity import RowId, changes_result, digest
from reproduction.points import Point
from reproduction.studies.lines import Entry, Line, lines_of
from reproduction.studies.results import OUTCOMES, Run, counted, judged_by
from reproduction.studies.study import PAPERS, Cell, Study, cells, comparisons, studies
from reproduction.studies.table import REPORT, Section, Table
from reproduction.studies.text import judged_on
from reproduction.words import key_of

LATENCY = "latency.json"  # of scripts/latency.py, beside the tables
REFERENCE = "attention"  # of the ratios of latencies


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What of a study is planned."""

    name: str  # as typed
    study: Study
    cells: list[Cell]
    keys: dict[RowId, str]  # of each cell, which the runs of its seeds share
    seeds: list[int]
    more: list[str]  # settings that are not the study's

    @property
    def runs(self) -> int:
        return len({*self.keys.values()}) * len(self.seeds)

    @property
    def file(self) -> str:
        """The name of its files: the study's, and what distinguishes this from all of it."""
        study, parts = self.study, [Path(self.name).stem]
        rows = list(dict.fromkeys(cell.id.row for cell in self.cells))
        if rows != list(study.rows):
            parts.append("+".join(rows))
        if self.seeds != list(range(study.first_seed, study.first_seed + study.seeds)):
            parts.append(f"seeds={len(self.seeds)}")
        if self.more:
            parts.append(digest(sorted(self.more)))
        return "-".join(parts)

    @property
    def about(self) -> list[str]:
        """Says what distinguishes the runs from those that the study names."""
        if not self.more:
            return []
        words = ", ".join(f"`{word}`" for word in self.more)
        return [f"With {words}; seeds {', '.join(map(str, self.seeds))}."]


def planned(points: Sequence[Point]) -> list[Planned]:
    """Returns the studies that these points are the runs of, the paper's in its order."""
    typed = dict.fromkeys(row.study for point in points for row in point.rows)
    names = [name for name in PAPERS if name in typed] or [*typed]  # a file is planned alone
    return [_planned(name, points) for name in names]


def _planned(name: str, points: Sequence[Point]) -> Planned:
    (study,) = studies(name).values()
    own = [point for point in points if any(row.study == name for row in point.rows)]
    keys = {row: point.row_hash for point in own for row in point.rows}
    each = [cell for cell in cells(name, study) if cell.id in keys]
    written = {word for cell in each for word in cell.words}
    words = dict.fromkeys(word for point in own for word in point.words)
    return Planned(
        name=name,
        study=study,
        cells=each,
        keys={cell.id: keys[cell.id] for cell in each},
        seeds=sorted({point.config.seed for point in own}),
        more=[word for word in words if word not in written and _is_setting(word)],
    )


def _is_setting(word: str) -> bool:
    return key_of(word) not in ("seed", "row") and changes_result(key_of(word))


def study_table(plan: Planned, runs: Sequence[Run], outputs: Path | None = None) -> Table:
    """Returns the table of a study: what is tested, by column, then the other outcomes.

    `outputs` holds the report of the runs, with what else was measured there.
    """
    study = plan.study
    of_rows = {*plan.keys.values()}
    chosen = counted([run for run in runs if run.key in of_rows and run.seed in plan.seeds])
    shown = chosen.runs
    notes = [*study.notes]
    if study.looks and not plan.more:
        seeds, note = look(study, len(of_rows), chosen.runs)
        shown = [run for run in chosen.runs if run.seed in seeds]
        notes.insert(0, note)
    entries = entries_of(plan)
    tested = study.tested or judged_by(shown)
    sections = _sections(entries, shown, tested, is_tested=True)
    for outcome in OUTCOMES:
        if outcome != tested:
            others = _sections(entries, shown, outcome, is_tested=False)
            sections += [section for section in others if section.finished]
    return Table(
        name=plan.file,
        title=study.title,
        about=[*plan.about, *judged_on(tested)],
        sections=sections,
        counted=chosen,
        notes=notes,
        extras={} if outputs is None else latencies(study, outputs),
        planned=plan.runs,
    )


def _sections(
    entries: Sequence[Entry], runs: Sequence[Run], outcome: str, is_tested: bool
) -> list[Section]:
    """Returns the lines of all rows, judged by an outcome, by column."""
    by_column = defaultdict[str, list[Line]](list)
    for line in lines_of(entries, runs, outcome, is_tested):
        by_column[line.entry.id.column].append(line)
    return [
        Section(title=_title(column, outcome, is_tested), lines=lines, is_tested=is_tested)
        for column, lines in by_column.items()
    ]


def latencies(study: Study, outputs: Path) -> dict[str, pd.DataFrame]:
    """Returns what scripts/latency.py has measured beside what is printed, by its title."""
    path = outputs / REPORT / LATENCY
    if not (study.latencies and path.exists()):
        return {}
    measured = json.loads(path.read_text())
    rows = []
    for name, printed in study.latencies.items():
        low, median, high = measured["ms"][name]
        rows.append(
            {
                "detector": name,
                "added to a step [ms]": f"{median:.1f} ({low:.1f} to {high:.1f})",
                "paper [ms]": f"{printed:g}",
                "ratio": f"{median / measured['ms'][REFERENCE][1]:.1f}",
                "paper's ratio": f"{printed / study.latencies[REFERENCE]:.1f}",
            }
        )
    return {f"Latency: {measured['about']}": pd.DataFrame(rows)}


def _title(column: str, outcome: str, is_tested: bool) -> str:
    title = OUTCOMES[outcome].title.capitalize()
    if is_tested:
        return column
    if column:
        return f"{column}: {title[0].lower()}{title[1:]}"
    return title


def entries_of(plan: Planned) -> list[Entry]:
    """Returns the rows of a study, with what is printed, then those that it quotes."""
    each = {cell.id: cell for cell in plan.cells}
    pairs = comparisons(plan.cells)
    entries = []
    for cell in plan.cells:
        entry = Entry(
            id=cell.id,
            heads={"row": cell.text},
            key=plan.keys[cell.id],
            role=cell.row.role,
            printed=cell.row.printed,
        )
        if cell.id in pairs:
            base = each[pairs[cell.id]]
            gap = cell.row.printed.get("top1", nan) - base.row.printed.get("top1", nan)
            entry = replace(entry, against=base.id, against_text=base.text, printed_difference=gap)
        entries.append(entry)
    for name, columns in plan.study.quoted.items():
        for column, printed in columns.items():
            quoted = RowId(plan.name, name, column=column)
            entries.append(Entry(id=quoted, heads={"row": name}, printed=printed))
    return entries


def look(study: Study, rows: int, runs: Sequence[Run]) -> tuple[Sequence[int], str]:
    """Returns the seeds of the latest look, and a note on it.

    A look at n is of the first n seeds of the study, once each of the `rows` has a run of them.
    """
    finished = pd.Series([run.seed for run in runs], dtype=int).value_counts()
    whole = {seed for seed, number in finished.items() if number == rows}
    seen: Sequence[int] = []
    for n in sorted(study.looks):
        seeds = range(study.first_seed, study.first_seed + n)
        if whole.issuperset(seeds):
            seen = seeds
    levels = [f"{n} seeds (at {100 * level:g} %)" for n, level in study.looks.items()]
    state = "none has been reached"
    if seen:
        state = f"this is the look at {len(seen)}, seeds {seen[0]} to {seen[-1]}"
    plan = f"Looks are at the first {' and the first '.join(levels)}, once all their runs are there"
    return seen, f"{plan}: {len(whole)} seeds are whole, {state}."
