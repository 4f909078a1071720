"""The table of a study: its rows with what is printed of them, its looks, its latencies."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from reproduction.identity import RowId, changes_result, digest
from reproduction.points import Point
from reproduction.studies.lines import Entry, Line, lines_of
from reproduction.studies.results import OUTCOMES, Outcome, Run, counted, judged_by
from reproduction.studies.study import PAPERS, Cell, Study, cells, comparisons, studies
from reproduction.studies.table import REPORT, Section, Table
from reproduction.studies.text import judged_on
from reproduction.words import key_of

LATENCY = "latency.json"  # of scripts/latency.py, beside the tables
REFERENCE = "attention"  # of the ratios of latencies


@dataclass(frozen=True, kw_only=True)
class PartOfStudy:
    """The rows and seeds of a study that a command asks for."""

    name: str  # of the study, as typed
    study: Study
    cells: list[Cell]
    row_hashes: dict[RowId, str]  # of each cell, which the runs of its seeds share
    seeds: list[int]
    more: list[str]  # settings that are not the study's

    @property
    def num_runs(self) -> int:
        return len({*self.row_hashes.values()}) * len(self.seeds)

    @property
    def file(self) -> str:
        """The name of its files: the study's, and what distinguishes it from the whole study."""
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


def parts_of(points: Sequence[Point]) -> list[PartOfStudy]:
    """Returns the studies that these points are the runs of, the paper's in its order."""
    names = list(dict.fromkeys(row.study for point in points for row in point.rows))
    papers = [name for name in PAPERS if name in names]
    if papers:  # a command is of studies of the paper or of one file: studies()
        names = papers
    return [_part(name, points) for name in names]


def _part(name: str, points: Sequence[Point]) -> PartOfStudy:
    (study,) = studies(name).values()  # again, whole: the notes of points have only its name
    own = [point for point in points if any(row.study == name for row in point.rows)]
    row_hashes = {row: point.row_hash for point in own for row in point.rows if row.study == name}
    each = [cell for cell in cells(name, study) if cell.id in row_hashes]
    written = {word for cell in each for word in cell.words}
    more = []
    for word in dict.fromkeys(word for point in own for word in point.words):
        key = key_of(word)
        is_setting = key != "seed" and changes_result(key)
        if is_setting and word not in written:
            more.append(word)
    return PartOfStudy(
        name=name,
        study=study,
        cells=each,
        row_hashes=row_hashes,
        seeds=sorted({point.config.seed for point in own}),
        more=more,
    )


def study_table(part: PartOfStudy, runs: Sequence[Run], outputs: Path) -> Table:
    """Returns the table of a study: the main outcome by column, then the others.

    `outputs` holds the report of the runs, with what else was measured there.
    """
    study = part.study
    row_hashes = {*part.row_hashes.values()}
    chosen = counted([run for run in runs if run.row_hash in row_hashes and run.seed in part.seeds])
    shown = chosen.runs
    notes = [*study.notes]
    if study.looks and not part.more:
        seeds, note = look(study, len(row_hashes), chosen.runs)
        shown = [run for run in chosen.runs if run.seed in seeds]
        notes.insert(0, note)
    entries = entries_of(part)
    main = judged_by(shown)
    if study.tested is not None:
        main = OUTCOMES[study.tested]
    sections = _sections(entries, shown, main, is_main=True)
    for outcome in OUTCOMES.values():
        if outcome != main:
            others = _sections(entries, shown, outcome, is_main=False)
            sections += [section for section in others if section.finished]
    return Table(
        name=part.file,
        title=study.title,
        about=[*part.about, *judged_on(main)],
        sections=sections,
        counted=chosen,
        notes=notes,
        extras=latencies(study, outputs),
    )


def _sections(
    entries: Sequence[Entry], runs: Sequence[Run], outcome: Outcome, is_main: bool
) -> list[Section]:
    """Returns the lines of all rows, judged by an outcome, by column."""
    by_column = defaultdict[str, list[Line]](list)
    for line in lines_of(entries, runs, outcome, is_main):
        by_column[line.entry.id.column].append(line)
    sections = []
    for column, lines in by_column.items():
        if is_main:
            title = column
        elif column:
            title = f"{column}: {outcome.title}"
        else:
            title = outcome.title.capitalize()
        sections.append(Section(title=title, lines=lines))
    return sections


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


def entries_of(part: PartOfStudy) -> list[Entry]:
    """Returns the rows of a study, with what is printed, then those that it quotes."""
    each = {cell.id: cell for cell in part.cells}
    pairs = comparisons(part.cells)
    entries = []
    for cell in part.cells:
        entry = Entry(
            id=cell.id,
            heads={"row": cell.text},
            row_hash=part.row_hashes[cell.id],
            role=cell.settings.role,
            printed=cell.settings.printed,
        )
        base = pairs.get(cell.id)
        if base is not None and part.row_hashes[base] != entry.row_hash:  # two rows may be one run
            entry = replace(entry, against=base, against_text=each[base].text)
        entries.append(entry)
    for name, columns in part.study.quoted.items():
        for column, printed in columns.items():
            quoted = RowId(part.name, name, column=column)
            entries.append(Entry(id=quoted, heads={"row": name}, printed=printed))
    return entries


def look(study: Study, num_rows: int, runs: Sequence[Run]) -> tuple[Sequence[int], str]:
    """Returns the seeds of the latest look, and a note on it.

    A look at n is of the first n seeds of the study, once each of its rows has a run of them.
    """
    counts = Counter(run.seed for run in runs)
    whole = {seed for seed, count in counts.items() if count == num_rows}
    seen: Sequence[int] = []
    for n in sorted(study.looks):
        seeds = range(study.first_seed, study.first_seed + n)
        if whole.issuperset(seeds):
            seen = seeds
    levels = [f"{n} seeds (at {100 * level:g} %)" for n, level in study.looks.items()]
    rule = f"Looks are at the first {' and the first '.join(levels)}, once all their runs are there"
    reached = "none has been reached"
    if seen:
        reached = f"this is the look at {len(seen)}, seeds {seen[0]} to {seen[-1]}"
    return seen, f"{rule}: {len(whole)} seeds are whole, {reached}."
