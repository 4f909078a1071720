"""One record per line of a table: what was measured here beside what the paper prints."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reproduction.cells import Cell
from reproduction.reporting.collect import CellRuns, Collection
from reproduction.reporting.folder import METRICS, Result
from reproduction.reporting.paper import PaperRow
from reproduction.reporting.statistics import Comparison, Spread, compare, spread

PRINTED = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "ImageNet-1K": "top1"}  # of a PaperRow
TESTED = "top1_last"


@dataclass(frozen=True)
class Counts:
    """Our parameters and MACs of one image, also without attention's matmuls, of a row's model."""

    parameters: int
    macs: int
    macs_without_attention: int


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line. Accuracies are in percent; `experiment` is None for what the paper only quotes."""

    table: int
    row: str
    column: str
    status: str
    paper: Mapping[str, float | None]  # top1, top5, and parameters (M) and macs (G) if printed
    experiment: str | None = None
    spreads: Mapping[str, Spread] = field(default_factory=dict)  # of each of METRICS, once run
    baseline: str | None = None
    comparison: Comparison | None = None
    counts: Counts | None = None
    seeds: tuple[int, ...] = ()
    results: tuple[Result, ...] = ()
    runs: tuple[str, ...] = ()

    def minus_paper(self, metric: str) -> float | None:
        """Mean of `metric` - the printed accuracy of the same kind."""
        printed = self.paper.get(metric.partition("_")[0])
        found = self.spreads.get(metric)
        return None if printed is None or found is None else found.mean - printed

    @property
    def seconds(self) -> Spread | None:
        """Of a run."""
        known = [result.seconds for result in self.results if result.seconds is not None]
        return spread(known) if known else None


def records_of(
    table: int,
    cells: Sequence[Cell],
    collection: Collection,
    papers: Sequence[PaperRow],
    counts: Mapping[tuple[int, str], Counts],
) -> list[Record]:
    """The lines of one table, column by column in the paper's order.

    `papers` are the printed rows of Tables 1 and 2, `counts` is keyed by (table, row).
    """
    mine = [cell for cell in cells if cell.table == table]
    rows = {row.row: row for row in papers if row.table == table}
    if not rows:
        return [_trained(cell, collection, None, None) for cell in mine]
    by_place = {(cell.row, cell.column): cell for cell in mine}
    return [
        record
        for column in dict.fromkeys(cell.column for cell in mine)
        for row in rows.values()
        for record in _printed(row, column, by_place, collection, counts.get((table, row.row)))
    ]


def _printed(
    row: PaperRow,
    column: str,
    cells: Mapping[tuple[str, str], Cell],
    collection: Collection,
    counts: Counts | None,
) -> Iterator[Record]:
    """The line of a printed row in one column; none if nothing is printed there."""
    cell = cells.get((row.row, column))
    top1 = getattr(row, PRINTED[column])
    if cell is not None:
        yield _trained(cell, collection, row, counts)
    elif top1 is not None:
        paper = {"top1": top1, "top5": row.top5, **_sizes(row)}
        yield Record(
            table=row.table,
            row=row.row,
            column=column,
            status="quoted",
            paper=paper,
            counts=counts,
        )


def _trained(
    cell: Cell, collection: Collection, row: PaperRow | None, counts: Counts | None
) -> Record:
    runs = collection.cells.get(cell.experiment)
    found = [] if runs is None else [run for run in runs.finished.values() if run.result]
    results = tuple(run.result for run in found if run.result is not None)
    spreads = {key: spread([r.accuracy[key] for r in results]) for key in METRICS if results}
    return Record(
        table=cell.table,
        row=cell.row,
        column=cell.column,
        status=_status(runs),
        experiment=cell.experiment,
        paper={"top1": cell.top1, "top5": cell.top5, **_sizes(row)},
        spreads=spreads,
        baseline=cell.baseline,
        comparison=_against(cell, collection) if results else None,
        counts=counts,
        seeds=tuple(run.seed for run in found),
        results=results,
        runs=tuple(run.folder for run in found),
    )


def _sizes(row: PaperRow | None) -> dict[str, float | None]:
    return {} if row is None else {"parameters": row.parameters, "macs": row.macs}


def _status(runs: CellRuns | None) -> str:
    if runs is None:
        return "no configuration at this scale"
    parts = [f"{len(runs.finished)} finished"] if runs.finished else []
    parts += [f"seed {run.seed} {run.status}" for run in runs.others]
    return "; ".join(parts) or "not run"


def _against(cell: Cell, collection: Collection) -> Comparison | None:
    if cell.baseline is None:
        return None
    pair = (collection.cells.get(name, CellRuns()) for name in (cell.experiment, cell.baseline))
    ours, baseline = (
        {seed: run.result.accuracy[TESTED] for seed, run in runs.finished.items() if run.result}
        for runs in pair
    )
    return compare(ours, baseline)


def flat(record: Record) -> dict[str, Any]:
    """Plain values for a file, without the table's scale: numbers are unrounded, None unknown."""
    test = record.comparison or Comparison(())
    seconds = record.seconds
    return {
        "table": record.table,
        "row": record.row,
        "column": record.column,
        "experiment": record.experiment,
        "status": record.status,
        "n": len(record.seeds),
        "seeds": list(record.seeds),
        **dict(_accuracies(record)),
        "paper_top1": record.paper["top1"],
        "paper_top5": record.paper["top5"],
        **{f"{key}_minus_paper": record.minus_paper(key) for key in METRICS},
        "baseline": record.baseline,
        "difference_to_baseline": test.difference,
        "test_seeds": list(test.seeds),
        "test_t": test.t,
        "test_p": test.p,
        "test_note": test.reason,
        "parameters": record.counts and record.counts.parameters,
        "macs": record.counts and record.counts.macs,
        "macs_without_attention": record.counts and record.counts.macs_without_attention,
        "paper_parameters_m": record.paper.get("parameters"),
        "paper_macs_g": record.paper.get("macs"),
        "seconds_mean": seconds and seconds.mean,
        "devices": known(r.devices for r in record.results),
        "hardware": known(r.hardware for r in record.results),
        "git_revisions": known(r.revision for r in record.results),
        "runs": list(record.runs),
    }


def _accuracies(record: Record) -> Iterator[tuple[str, float | None]]:
    for key in METRICS:
        found = record.spreads.get(key)
        yield f"{key}_mean", None if found is None else found.mean
        yield f"{key}_std", None if found is None else found.std


def known(values: Iterable[Any]) -> list[Any]:
    """What differs among the values, None left out, in order of appearance."""
    return list(dict.fromkeys(value for value in values if value is not None))
