"""One record per line of a table: what was measured here, beside what the paper prints."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reproduction.cells import Cell
from reproduction.reporting.collect import METRICS, Collection
from reproduction.reporting.latency import (
    Latency,
    Measurement,
    flat_latency,
    printed_latencies,
)
from reproduction.reporting.measured import Measured, measured
from reproduction.reporting.paper import PaperRow

PRINTED = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "ImageNet-1K": "top1"}  # of a PaperRow


@dataclass(frozen=True)
class Counts:
    """Our parameters and MACs of one image, also without attention's matmuls, of a row's model."""

    parameters: int
    macs: int
    macs_without_attention: int


@dataclass(frozen=True, kw_only=True)
class Record(Measured):
    """One line of the paper's tables; `is_papers`: trained as the paper did, on the same data."""

    table: int
    is_papers: bool = True
    paper: Mapping[str, float | None]  # top1, top5, and parameters (M) and macs (G) if printed
    baseline: str | None = None
    counts: Counts | None = None
    latency: Latency | None = None
    paper_latency: Latency | None = None

    def minus_paper(self, metric: str) -> float | None:
        """Mean of `metric` - the printed accuracy; None where they are of different experiments."""
        printed = self.paper.get(metric.partition("_")[0]) if self.is_papers else None
        found = self.spreads.get(metric)
        return None if printed is None or found is None else found.mean - printed

    def flat(self) -> dict[str, Any]:
        return {
            "table": self.table,
            "row": self.row,
            "column": self.column,
            "experiment": self.experiment,
            "status": self.status,
            "n": len(self.seeds),
            "seeds": list(self.seeds),
            **self.accuracies(),
            "paper_top1": self.paper["top1"],
            "paper_top5": self.paper["top5"],
            **{f"{key}_minus_paper": self.minus_paper(key) for key in METRICS},
            "baseline": self.baseline,
            **self.test("baseline"),
            "parameters": self.counts and self.counts.parameters,
            "macs": self.counts and self.counts.macs,
            "macs_without_attention": self.counts and self.counts.macs_without_attention,
            "paper_parameters_m": self.paper.get("parameters"),
            "paper_macs_g": self.paper.get("macs"),
            **self._latencies(),
            **self.origin(),
        }

    def _latencies(self) -> dict[str, float | None]:
        if self.paper_latency is None:
            return {}
        return {
            **flat_latency("latency", self.latency),
            **flat_latency("paper_latency", self.paper_latency),
        }


def records_of(
    table: int,
    cells: Sequence[Cell],
    collection: Collection,
    papers: Sequence[PaperRow],
    counts: Mapping[tuple[int, str], Counts],
    latency: Measurement | None,
) -> list[Record]:
    """The lines of one table, column by column in the paper's order.

    `papers` are the printed rows of Tables 1 and 2, `counts` is keyed by (table, row), `latency` is
    what was measured for Table 3.
    """
    mine = [cell for cell in cells if cell.table == table]
    rows = {row.row: row for row in papers if row.table == table}
    if not rows:
        ours, printed = {} if latency is None else latency.latencies(), printed_latencies(mine)
        return [
            replace(
                _trained(cell, collection, None, None),
                latency=ours.get(cell.row) if cell.row in printed else None,
                paper_latency=printed.get(cell.row),
            )
            for cell in mine
        ]
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
    return Record(
        table=cell.table,
        row=cell.row,
        column=cell.column,
        paper={"top1": cell.top1, "top5": cell.top5, **_sizes(row)},
        baseline=cell.baseline,
        counts=counts,
        **measured(cell.experiment, cell.baseline, collection),
    )


def _sizes(row: PaperRow | None) -> dict[str, float | None]:
    return {} if row is None else {"parameters": row.parameters, "macs": row.macs}
