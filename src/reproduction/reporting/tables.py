"""Tables and sweeps as data: title, columns as text, records as numbers, notes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from reproduction.reporting.cells import FULL, SCALES
from reproduction.reporting.collect import Collection
from reproduction.reporting.columns import Column, columns_of, short_revision, sweep_columns
from reproduction.reporting.latency import PAPERS, Measurement, command
from reproduction.reporting.records import (
    Measured,
    Sources,
    Sweep,
    known,
    records_of,
    sweep_records,
)
from reproduction.reporting.statistics import Comparison, holm, p_text

TEXTS = Path(__file__).with_name("tables.yaml")
TABLES = (1, 2, 3, 4, 5)
LEVEL = 0.05  # of significance


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table at one scale; `name` is that of its files.

    `mark` says why it does not show the paper's experiments, None if it does.
    """

    name: str
    title: str
    scale: str
    mark: str | None
    columns: tuple[Column, ...]
    records: tuple[Measured, ...]
    notes: tuple[str, ...]

    @property
    def banner(self) -> str | None:
        """`mark` as a warning."""
        if self.mark is None:
            return None
        about = "" if self.scale == FULL else f" ({SCALES[self.scale].about})"
        return (
            f"{self.mark.upper()}{about}: these runs are not the paper's experiments, and no value "
            "here may be compared with the paper's."
        )

    def sections(self) -> Iterator[tuple[str, list[Measured]]]:
        for name, records in groupby(self.records, key=lambda record: record.column):
            yield name, list(records)


def build_table(number: int, sources: Sources) -> Table:
    texts, scale = _texts(), sources.scale
    cells = [cell for cell in sources.cells if cell.table == number]
    mark = sources.mark(*(cell.experiment for cell in cells))
    records = [replace(record, is_papers=mark is None) for record in records_of(number, sources)]
    has_sizes = any(row.table == number for row in sources.papers)
    has_latency = any(cell.latency_ms is not None for cell in cells)
    notes = [
        texts["accuracies"],
        *texts["common"],
        *([texts["sizes"]] if has_sizes else []),
        *texts["notes"][number],
        *([_latency_note(sources.latency, scale)] if has_latency else []),
        *significance(records, "the baseline"),
        *_origin_notes(records, sources.collection),
    ]
    return Table(
        name=f"table{number}",
        title=f"Table {number} at {scale} scale: {texts['titles'][number]}",
        scale=scale,
        mark=mark,
        columns=tuple(columns_of(sources.cells, mark is None, number == 2, has_sizes, has_latency)),
        records=tuple(records),
        notes=tuple(notes),
    )


def build_sweep(sweep: Sweep, sources: Sources) -> Table:
    texts, scale = _texts(), sources.scale
    (cell,) = (cell for cell in sources.cells if cell.experiment == sweep.experiment)
    config = sources.configs[sweep.experiment]
    has_mixing = config.augmentation.htm is not None
    records = list(sweep_records(sweep, cell, sources, has_mixing))
    mixing = texts["mixing"].format(batch_size=config.recipe.batch_size)
    mark = sources.mark(sweep.experiment)
    if mark is not None:  # the printed accuracies may belong to another value of the key
        records = [replace(record, paper=None) for record in records]
    return Table(
        name=sweep.name,
        title=f"Sensitivity to {sweep.word} at {scale} scale: {texts['sweep_titles'][sweep.name]}",
        scale=scale,
        mark=mark,
        columns=tuple(sweep_columns(sweep.word, has_mixing)),
        records=tuple(records),
        notes=(
            texts["accuracies"],
            texts["sweep_difference"].format(word=sweep.word, table=cell.table),
            *([mixing] if has_mixing else []),
            *texts["sweep_notes"][sweep.name],
            *(problem for record in records for problem in record.unread),
            *significance(records, f"the {sweep.word} of Table {cell.table}"),
            *_origin_notes(records, sources.collection),
        ),
    )


@cache
def _texts() -> dict[str, Any]:
    return yaml.safe_load(TEXTS.read_text())


def significance(records: Sequence[Measured], reference: str) -> Iterator[str]:
    """Yields a note on the significant differences from `reference` if there are comparisons."""
    compared = [(record, record.comparison) for record in records if record.comparison is not None]
    several = len({record.column for record, _ in compared}) > 1
    tests: list[tuple[str, Comparison, float]] = []
    reasons: dict[str, list[str]] = {}
    for record, test in compared:
        name = f"{record.label} on {record.column}" if several else record.label
        if test.p is not None:
            tests.append((name, test, test.p))
        if test.reason is not None:
            reasons.setdefault(test.reason, []).append(name)
    sentences = list(_verdicts(tests, reference)) if tests else []
    sentences += [f"Not tested ({why}): {'; '.join(rows)}." for why, rows in reasons.items()]
    if sentences:
        yield " ".join(sentences)


def _verdicts(tests: Sequence[tuple[str, Comparison, float]], reference: str) -> Iterator[str]:
    corrected = holm([p for _, _, p in tests])
    lists = {True: list[str](), False: list[str]()}
    for name, test, p in tests:
        lists[p < LEVEL].append(f"{name} {test.difference:+.2f} (p = {p_text(p)})")
    yield f"Significant at 5 % against {reference}: {'; '.join(lists[True]) or 'none'}."
    yield f"Not significant: {'; '.join(lists[False]) or 'none'}."
    names = [name for (name, _, _), p in zip(tests, corrected, strict=True) if p < LEVEL]
    number = f"{len(tests)} test{'s' if len(tests) > 1 else ''}"
    yield f"{number}; significant after Holm's correction: {'; '.join(names) or 'none'}."


def _origin_notes(records: Sequence[Measured], collection: Collection) -> Iterator[str]:
    """Yields notes on shared runs, on runs without a result, and on the counted runs."""
    mine = {record.experiment for record in records if record.experiment is not None}
    groups: dict[str, list[str]] = {}
    for name, key in collection.keys.items():
        groups.setdefault(key, []).append(name)
    shared = [", ".join(x) for x in groups.values() if len(x) > 1 and not mine.isdisjoint(x)]
    if shared:
        yield f"Cells of the same configuration share their runs: {'; '.join(shared)}."
    for run in collection.runs():
        names = [name for name in collection.experiments(run) if name in mine]
        if run.result is None and names:
            why = "" if run.error is None else f": {run.error}"
            yield f"Not counted: {run.folder} ({', '.join(names)}) is {run.status}{why}"
    yield _provenance(records)


def _provenance(records: Sequence[Measured]) -> str:
    results = {
        run: result
        for record in records
        for run, result in zip(record.runs, record.results, strict=True)
    }
    if not results:
        return "No row of this table has a finished run yet."
    hours = sum(result.seconds or 0 for result in results.values()) / 3600
    revisions = known(result.revision for result in results.values())
    text = f"{len(results)} finished runs, {hours:.2f} hours in total, git "
    text += ", ".join(short_revision(r) for r in revisions) or "revision unknown"
    if len(revisions) > 1:
        text += "; the runs are of more than one revision"
    if any(revision.endswith("-dirty") for revision in revisions):
        text += "; -dirty: the code differs from the revision"
    return f"{text}."


def _latency_note(latency: Measurement | None, scale: str) -> str:
    if latency is None:
        return f"Latency is not measured here yet; {command(scale)} measures it."
    return (
        f"Latency: median (quartiles) of {latency.repeats} repeats in ms, x: ratio to attention. "
        f"Ours: {latency.conditions}. The paper's: {PAPERS}"
        + (", so only the ratios compare." if scale == FULL else "; other models or batches.")
    )
