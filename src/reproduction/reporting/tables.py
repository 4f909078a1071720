"""The paper's tables as data: title, columns as text, records as numbers, notes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import yaml

from reproduction.cells import Cell
from reproduction.config import Config
from reproduction.reporting.collect import Collection
from reproduction.reporting.columns import Column, columns_of, short_revision
from reproduction.reporting.paper import PaperRow
from reproduction.reporting.records import Counts, Record, known, records_of
from reproduction.reporting.significance import significance
from reproduction.scales import FULL, SCALES

TEXTS = Path(__file__).with_name("tables.yaml")
TABLES = (1, 2, 3, 4, 5)


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table at one scale; `banner` says why it is not the paper's experiment, if it is not."""

    number: int
    title: str
    scale: str
    banner: str | None
    columns: tuple[Column, ...]
    records: tuple[Record, ...]
    notes: tuple[str, ...]

    def sections(self) -> Iterator[tuple[str, list[Record]]]:
        """(data set, its lines)."""
        for name, records in groupby(self.records, key=lambda record: record.column):
            yield name, list(records)


def build_table(
    number: int,
    scale: str,
    *,
    cells: Sequence[Cell],
    configs: Mapping[str, Config],
    collection: Collection,
    papers: Sequence[PaperRow],
    counts: Mapping[tuple[int, str], Counts],
) -> Table:
    """One of TABLES at the `scale` at which `configs` (experiment -> configuration) were resolved.

    `papers` are the printed rows of Tables 1 and 2, `counts` our sizes by (table, row).
    """
    texts = yaml.safe_load(TEXTS.read_text())
    mine = [cell for cell in cells if cell.table == number]
    records = records_of(number, cells, collection, papers, counts)
    has_sizes = any(row.table == number for row in papers)
    notes = [
        *texts["common"],
        *([texts["sizes"]] if has_sizes else []),
        *texts["notes"][number],
        *significance(records),
        *_shared(mine, collection),
        *_unfinished(mine, collection),
        *_provenance(records),
    ]
    return Table(
        number=number,
        title=f"Table {number} at {scale} scale: {texts['titles'][number]}",
        scale=scale,
        banner=banner(scale, mine, configs),
        columns=tuple(columns_of(cells, has_top5=number == 2, has_sizes=has_sizes)),
        records=tuple(records),
        notes=tuple(notes),
    )


def banner(scale: str, cells: Sequence[Cell], configs: Mapping[str, Config]) -> str | None:
    """What keeps these cells from being the paper's experiments; None if nothing does."""
    warnings = []
    if scale != FULL:
        warnings.append(
            f"{scale.upper()} SCALE ({SCALES[scale].about}): these runs are not the paper's "
            "experiments, and no value here may be compared with the paper's"
        )
    resolved = [(configs[cell.experiment], cell) for cell in cells if cell.experiment in configs]
    others = {
        f"{config.dataset.name} in place of {cell.column}"
        for config, cell in resolved
        if config.dataset.name != cell.column.lower().replace("-", "")
    }
    if others:
        warnings.append(f"OTHER DATA: {', '.join(sorted(others))}")
    return ". ".join(warnings) + "." if warnings else None


def _shared(cells: Sequence[Cell], collection: Collection) -> Iterator[str]:
    """Which cells are of one configuration, and share their runs."""
    mine = {cell.experiment for cell in cells}
    groups: dict[tuple[str, ...], None] = {}
    for name in mine & collection.keys.keys():
        key = collection.keys[name]
        groups[tuple(sorted(other for other, k in collection.keys.items() if k == key))] = None
    names = [" = ".join(group) for group in sorted(groups) if len(group) > 1]
    if names:
        yield f"Of one configuration, and so from the same runs: {'; '.join(names)}."


def _unfinished(cells: Sequence[Cell], collection: Collection) -> Iterator[str]:
    """The runs that were begun and have no result, each once."""
    mine = {cell.experiment for cell in cells}
    for run in collection.runs():
        names = [name for name in collection.experiments(run) if name in mine]
        if run.result is None and names:
            why = "" if run.error is None else f": {run.error}"
            yield f"Not counted: {run.folder} ({', '.join(names)}) is {run.status}{why}"


def _provenance(records: Sequence[Record]) -> Iterator[str]:
    """Where the numbers come from, for formats that leave the columns out."""
    results = {
        run: result
        for record in records
        for run, result in zip(record.runs, record.results, strict=True)
    }
    if not results:
        yield "No cell of this table has a finished run yet."
        return
    hours = sum(result.seconds or 0 for result in results.values()) / 3600
    revisions = known(result.revision for result in results.values())
    dirty = [revision for revision in revisions if revision.endswith("-dirty")]
    text = f"{len(results)} finished runs, {hours:.2f} hours in all, git "
    text += ", ".join(short_revision(r) for r in revisions) or "revision not known"
    if len(revisions) > 1:
        text += "; the runs are of more than one revision"
    if dirty:
        text += "; -dirty: of code that differs from its revision"
    yield f"{text}."
