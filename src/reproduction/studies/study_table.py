"""The table of a study: its rows with what is printed of them, its looks, its latencies."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from reproduction.identity import RowId
from reproduction.studies.lines import Entry, Line, lines_of
from reproduction.studies.results import OUTCOMES, Outcome, Run, counted, judged_by
from reproduction.studies.study import Cell, Part, Study
from reproduction.studies.table import REPORT, Section, Table
from reproduction.studies.text import judged_on, value_text

LATENCY = "latency.json"  # of scripts/latency.py, beside the tables
REFERENCE = "attention"  # of the ratios of latencies


def study_table(part: Part, runs: Sequence[Run], outputs: Path) -> Table:
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


def entries_of(part: Part) -> list[Entry]:
    """Returns the rows of a study, with what is printed, then those that it quotes."""
    ids = {cell.label: id_of(part, cell) for cell in part.cells}
    texts = {cell.label: cell.text for cell in part.cells}
    hashes = part.row_hashes
    entries = []
    for cell in part.cells:
        entry = Entry(
            id=ids[cell.label],
            heads={"row": cell.text},
            row_hash=hashes[cell.label],
            role=cell.settings.role,
            printed=cell.settings.printed,
        )
        base = part.pairs.get(cell.label)
        if base is not None and hashes[base] != entry.row_hash:  # two rows may be one run
            entry = replace(entry, against=ids[base], against_text=texts[base])
        entries.append(entry)
    for name, columns in part.study.quoted.items():
        for column, printed in columns.items():
            quoted = RowId(part.name, name, column=column)
            entries.append(Entry(id=quoted, heads={"row": name}, printed=printed))
    return entries


def id_of(part: Part, cell: Cell) -> RowId:
    swept = tuple((key, value_text(value)) for key, value in cell.values.items())
    return RowId(part.name, cell.row, swept, cell.settings.column)


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
