"""A record per line of a table: what the runs of one configuration reached, beside the paper."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from reproduction.config import Config
from reproduction.reporting.cells import FULL, Cell
from reproduction.reporting.collect import METRICS, CellRuns, Collection, Result
from reproduction.reporting.curves import Epoch, last_epoch
from reproduction.reporting.latency import (
    Latency,
    Measurement,
    flat_latency,
    printed_latencies,
)
from reproduction.reporting.model_stats import Counts, PaperRow
from reproduction.reporting.statistics import Comparison, Spread, compare, flat_spread, spread
from reproduction.runs.folder import RunFolder
from reproduction.system.errors import UserError

TESTED = "top1_last"
PRINTED = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "ImageNet-1K": "top1"}  # of a PaperRow


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What a report is made from; `outputs` holds the runs.

    `configs` are those of all cells and values of sweeps at the `scale`, `papers` the printed rows
    of Tables 1 and 2, `counts` our sizes by (table, row), `latency` what was measured for Table 3.
    """

    outputs: Path
    scale: str
    cells: Sequence[Cell]
    configs: Mapping[str, Config]
    collection: Collection
    papers: Sequence[PaperRow]
    counts: Mapping[tuple[int, str], Counts]
    latency: Measurement | None

    def command(self, target: str) -> str:
        """What makes the runs of this scale."""
        return f"make {target}" + ("" if self.scale == FULL else f" SCALE={self.scale}")

    def finished(self, experiment: str) -> dict[int, Path]:
        """seed -> folder."""
        runs = self.collection.cells.get(experiment, CellRuns()).finished
        return {seed: self.outputs / run.folder for seed, run in sorted(runs.items())}

    def mark(self, *experiments: str) -> str | None:
        """In a few words why these are not the paper's experiments; None if they are."""
        others = {
            f"{self.configs[cell.experiment].dataset.name} in place of {cell.column}"
            for cell in self.cells
            if cell.experiment in experiments and cell.experiment in self.configs
            if self.configs[cell.experiment].dataset.name != cell.column.lower().replace("-", "")
        }
        scale = [] if self.scale == FULL else [f"{self.scale} scale"]
        return ", ".join([*scale, *sorted(others)]) or None


@dataclass(frozen=True, kw_only=True)
class Measured(ABC):
    """What the finished runs of one configuration have reached, and how far the others are.

    Accuracies are in percent; `experiment` is None for what the paper only quotes.
    """

    row: str
    column: str
    status: str
    experiment: str | None = None
    spreads: Mapping[str, Spread] = field(default_factory=dict)  # of each of METRICS, once run
    comparison: Comparison | None = None
    seeds: tuple[int, ...] = ()
    results: tuple[Result, ...] = ()
    runs: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What a sentence calls it."""
        return self.row

    def flat(self) -> dict[str, Any]:
        """Plain values for a file, without the scale: numbers are unrounded, None unknown."""
        accuracies = (flat_spread(key, self.spreads.get(key)).items() for key in METRICS)
        seconds = [result.seconds for result in self.results if result.seconds is not None]
        return {
            **self._place(),
            "row": self.row,
            "column": self.column,
            "experiment": self.experiment,
            "status": self.status,
            "n": len(self.seeds),
            "seeds": list(self.seeds),
            **dict(chain.from_iterable(accuracies)),
            **self._beside(),
            "seconds_mean": fmean(seconds) if seconds else None,
            "devices": known(r.devices for r in self.results),
            "hardware": known(r.hardware for r in self.results),
            "git_revisions": known(r.revision for r in self.results),
            "runs": list(self.runs),
        }

    @abstractmethod
    def _place(self) -> dict[str, Any]:
        """Which table or sweep the line is of."""

    @abstractmethod
    def _beside(self) -> dict[str, Any]:
        """What stands beside the accuracies: the paper's, the comparison, ..."""

    def _test(self, reference: str) -> dict[str, Any]:
        """The comparison with what `reference` names."""
        found = self.comparison or Comparison(())
        return {
            f"difference_to_{reference}": found.difference,
            "test_seeds": list(found.seeds),
            "test_t": found.t,
            "test_p": found.p,
            "test_note": found.reason,
        }


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

    def _place(self) -> dict[str, Any]:
        return {"table": self.table}

    def _beside(self) -> dict[str, Any]:
        latencies = {}
        if self.paper_latency is not None:
            latencies = flat_latency("latency", self.latency)
            latencies |= flat_latency("paper_latency", self.paper_latency)
        return {
            "paper_top1": self.paper["top1"],
            "paper_top5": self.paper["top5"],
            **{f"{key}_minus_paper": self.minus_paper(key) for key in METRICS},
            "baseline": self.baseline,
            **self._test("baseline"),
            "parameters": self.counts and self.counts.parameters,
            "macs": self.counts and self.counts.macs,
            "macs_without_attention": self.counts and self.counts.macs_without_attention,
            "paper_parameters_m": self.paper.get("parameters"),
            "paper_macs_g": self.paper.get("macs"),
            **latencies,
        }


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The runs of `experiment` with other values of `key`.

    `values` maps each value, as it is written, to the name of its configuration.
    """

    name: str
    experiment: str
    key: str
    values: Mapping[str, str]

    @property
    def word(self) -> str:
        """The key without its group."""
        return self.key.rpartition(".")[2]


@dataclass(frozen=True, kw_only=True)
class SweepRecord(Measured):
    """One value of the key; without a value the baseline, which has no such key.

    `is_own`: the value of the experiment itself. Mixed samples in a batch, and tokens replaced in
    each, are means over the last epoch.
    """

    sweep: Sweep
    value: str | None
    is_own: bool = False
    paper: float | None = None  # the accuracy that is printed for these runs
    mixed_samples: Spread | None = None
    mixed_tokens: Spread | None = None
    unread: tuple[str, ...] = ()  # why the mixing of some runs is not known

    @property
    def label(self) -> str:
        return self.row if self.value is None else f"{self.sweep.word} = {self.value}"

    def _place(self) -> dict[str, Any]:
        return {"key": self.sweep.key, "value": self.value, "is_own_value": self.is_own}

    def _beside(self) -> dict[str, Any]:
        return {
            "paper_top1": self.paper,
            **self._test("own_value"),
            **flat_spread("mixed_samples", self.mixed_samples),
            **flat_spread("mixed_tokens", self.mixed_tokens),
        }


def records_of(table: int, sources: Sources) -> list[Record]:
    """The lines of one table, column by column in the paper's order."""
    mine = [cell for cell in sources.cells if cell.table == table]
    rows = [row for row in sources.papers if row.table == table]
    if not rows:
        return [_trained(cell, None, sources) for cell in mine]
    by_place = {(cell.row, cell.column): cell for cell in mine}
    records = []
    for column in dict.fromkeys(cell.column for cell in mine):
        for row in rows:
            if cell := by_place.get((row.row, column)):
                records.append(_trained(cell, row, sources))
            elif (top1 := getattr(row, PRINTED[column])) is not None:
                records.append(
                    Record(
                        table=table,
                        row=row.row,
                        column=column,
                        status="quoted",
                        **_printed(row, top1, row.top5, sources),
                    )
                )
    return records


def _trained(cell: Cell, row: PaperRow | None, sources: Sources) -> Record:
    """Of a cell, with what its printed row tells where the table has such rows."""
    has_latency = cell.latency_ms is not None
    ours = {} if sources.latency is None else sources.latency.latencies()
    return Record(
        table=cell.table,
        row=cell.row,
        column=cell.column,
        baseline=cell.baseline,
        latency=ours.get(cell.row) if has_latency else None,
        paper_latency=printed_latencies(sources.cells)[cell.row] if has_latency else None,
        **_printed(row, cell.top1, cell.top5, sources),
        **_measured(cell.experiment, cell.baseline, sources.collection),
    )


def _printed(
    row: PaperRow | None, top1: float, top5: float | None, sources: Sources
) -> dict[str, Any]:
    """What Record holds of the paper, and our sizes of its row."""
    paper = {"top1": top1, "top5": top5}
    if row is None:
        return {"paper": paper}
    sizes = {"parameters": row.parameters, "macs": row.macs}
    return {"paper": paper | sizes, "counts": sources.counts.get((row.table, row.row))}


def sweep_records(
    sweep: Sweep, cell: Cell, sources: Sources, has_mixing: bool
) -> Iterator[SweepRecord]:
    """The baseline, and every value of the cell's key; `has_mixing`: what HTM mixes is read."""
    (baseline,) = (other for other in sources.cells if other.experiment == cell.baseline)
    collection = sources.collection
    yield SweepRecord(
        row="baseline",
        column=baseline.column,
        sweep=sweep,
        value=None,
        paper=baseline.top1,
        **_measured(baseline.experiment, sweep.experiment, collection),
    )
    own = collection.keys[sweep.experiment]
    for value, name in sweep.values.items():
        is_own = collection.keys[name] == own
        found = _measured(name, None if is_own else sweep.experiment, collection)
        yield SweepRecord(
            row=f"{value} (as in Table {cell.table})" if is_own else value,
            column=cell.column,
            sweep=sweep,
            value=value,
            is_own=is_own,
            paper=cell.top1 if is_own else None,
            **found,
            **(_mixing(found["runs"], sources.outputs) if has_mixing else {}),
        )


def _mixing(runs: Sequence[str], outputs: Path) -> dict[str, Any]:
    """Mixed samples and tokens of the runs whose metrics can be read, and why of the others not."""
    epochs: list[Epoch] = []
    unread: list[str] = []
    for run in runs:
        try:
            epochs.append(last_epoch(RunFolder(outputs / run).metrics_path))
        except UserError as error:
            unread.append(f"Mixed samples and tokens are without {run}: {error}")
    tokens = [epoch.mixed_tokens for epoch in epochs if epoch.mixed_tokens is not None]
    return {
        "mixed_samples": spread([epoch.mixed_samples for epoch in epochs]) if epochs else None,
        "mixed_tokens": spread(tokens) if tokens else None,
        "unread": tuple(unread),
    }


def _measured(name: str, reference: str | None, collection: Collection) -> dict[str, Any]:
    """What Measured holds of the configuration `name`, tested against that of `reference`."""
    runs = collection.cells.get(name)
    found = [] if runs is None else list(runs.finished.values())
    results = tuple(run.result for run in found if run.result is not None)  # of all of them
    return {
        "status": _status(runs),
        "experiment": name,
        "spreads": {key: spread([r.accuracy[key] for r in results]) for key in METRICS if results},
        "comparison": _against(name, reference, collection) if reference and results else None,
        "seeds": tuple(run.seed for run in found),
        "results": results,
        "runs": tuple(run.folder for run in found),
    }


def _status(runs: CellRuns | None) -> str:
    if runs is None:
        return "no configuration at this scale"
    parts = [f"{len(runs.finished)} finished"] if runs.finished else []
    parts += [f"seed {run.seed} {run.status}" for run in runs.others]
    return "; ".join(parts) or "not run"


def _against(name: str, reference: str, collection: Collection) -> Comparison:
    pair = (collection.cells.get(each, CellRuns()) for each in (name, reference))
    ours, theirs = (
        {seed: run.result.accuracy[TESTED] for seed, run in runs.finished.items() if run.result}
        for runs in pair
    )
    return compare(ours, theirs)


def known(values: Iterable[Any]) -> list[Any]:
    """What differs among the values, None left out, in order of appearance."""
    return list(dict.fromkeys(value for value in values if value is not None))
