"""A record for each row of a table: the results of one configuration, beside the printed values."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from reproduction.config import Config
from reproduction.reporting.cells import FULL, Cell
from reproduction.reporting.collect import METRICS, CellRuns, Collection, Result
from reproduction.reporting.curves import Epoch, last_epoch
from reproduction.reporting.latency import Latency, Measurement, flat_latency, printed_latencies
from reproduction.reporting.model_stats import Counts, PaperRow
from reproduction.reporting.statistics import Comparison, Spread, compare, flat_spread, spread
from reproduction.runs.folder import RunFolder
from reproduction.system.errors import UserError

TESTED = "top1_last"
PRINTED = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "ImageNet-1K": "top1"}  # of a PaperRow


@dataclass(frozen=True, kw_only=True)
class Sources:
    """All inputs of a report.

    `outputs` holds the runs. `configs` has the cells and the values of sweeps at the `scale`,
    `papers` the printed rows of Tables 1 and 2, `counts` our sizes by (table, row), `latency` the
    measurement for Table 3.
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
        """Returns the command that trains the runs of a make target at this scale."""
        return f"make {target}" + ("" if self.scale == FULL else f" SCALE={self.scale}")

    def finished(self, experiment: str) -> dict[int, Path]:
        """Returns the folders of the finished runs by seed."""
        runs = self.collection.cells.get(experiment, CellRuns()).finished
        return {seed: self.outputs / run.folder for seed, run in sorted(runs.items())}

    def mark(self, *experiments: str) -> str | None:
        """Says briefly why these are not the paper's experiments; None if they are."""
        others = set()
        for cell in self.cells:
            if cell.experiment in experiments and cell.experiment in self.configs:
                name = self.configs[cell.experiment].dataset.name
                if name != cell.dataset:
                    others.add(f"{name} instead of {cell.column}")
        scale = [] if self.scale == FULL else [f"{self.scale} scale"]
        return ", ".join([*scale, *sorted(others)]) or None


@dataclass(frozen=True, kw_only=True)
class Measured(ABC):
    """The results of the finished runs of one configuration, and the status of the others.

    Accuracies are in percent; `experiment` is None for rows that the paper quotes.
    """

    row: str
    column: str
    status: str
    experiment: str | None = None
    spreads: Mapping[str, Spread] = field(default_factory=dict)  # by METRICS; empty without runs
    comparison: Comparison | None = None
    seeds: tuple[int, ...] = ()
    results: tuple[Result, ...] = ()
    runs: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name of the row in a sentence."""
        return self.row

    def flat(self) -> dict[str, Any]:
        """Returns plain values for files: numbers are unrounded, unknown values None."""
        accuracies: dict[str, float | None] = {}
        for key in METRICS:
            accuracies |= flat_spread(key, self.spreads.get(key))
        seconds = [result.seconds for result in self.results if result.seconds is not None]
        return {
            **self._leading(),
            "row": self.row,
            "column": self.column,
            "experiment": self.experiment,
            "status": self.status,
            "n": len(self.seeds),
            "seeds": list(self.seeds),
            **accuracies,
            **self._specific(),
            "seconds_mean": fmean(seconds) if seconds else None,
            "devices": known(r.devices for r in self.results),
            "hardware": known(r.hardware for r in self.results),
            "git_revisions": known(r.revision for r in self.results),
            "runs": list(self.runs),
        }

    @abstractmethod
    def _leading(self) -> dict[str, Any]:
        """Returns the columns before the row: its table or value."""

    @abstractmethod
    def _specific(self) -> dict[str, Any]:
        """Returns the columns after the accuracies: printed values, comparison, ..."""

    def _test(self, reference: str) -> dict[str, Any]:
        test = self.comparison or Comparison(())
        return {
            f"difference_to_{reference}": test.difference,
            "test_seeds": list(test.seeds),
            "test_t": test.t,
            "test_p": test.p,
            "test_note": test.reason,
        }


@dataclass(frozen=True, kw_only=True)
class Record(Measured):
    """A row of the paper's tables; `is_papers`: trained as in the paper, on the same data."""

    table: int
    is_papers: bool = True
    paper: Mapping[str, float | None]  # top1, top5, and parameters (M) and macs (G) if printed
    baseline: str | None = None
    counts: Counts | None = None
    latency: Latency | None = None
    paper_latency: Latency | None = None

    def minus_paper(self, metric: str) -> float | None:
        """Returns the mean of `metric` minus the printed accuracy, if they are comparable."""
        printed = self.paper.get(metric.partition("_")[0]) if self.is_papers else None
        ours = self.spreads.get(metric)
        return None if printed is None or ours is None else ours.mean - printed

    def _leading(self) -> dict[str, Any]:
        return {"table": self.table}

    def _specific(self) -> dict[str, Any]:
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

    `values` maps each value, as written on the command line, to the name of its configuration.
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
    """One value of a sweep, or its baseline, which has no value.

    `is_own`: the value of the experiment itself. Mixed samples per batch, and mixed tokens per
    mixed sample, are means over the last epoch.
    """

    sweep: Sweep
    value: str | None
    is_own: bool = False
    paper: float | None = None  # the printed accuracy of these runs
    mixed_samples: Spread | None = None
    mixed_tokens: Spread | None = None
    unread: tuple[str, ...] = ()  # errors of runs whose metrics cannot be read

    @property
    def label(self) -> str:
        return self.row if self.value is None else f"{self.sweep.word} = {self.value}"

    def _leading(self) -> dict[str, Any]:
        return {"key": self.sweep.key, "value": self.value, "is_own_value": self.is_own}

    def _specific(self) -> dict[str, Any]:
        return {
            "paper_top1": self.paper,
            **self._test("own_value"),
            **flat_spread("mixed_samples", self.mixed_samples),
            **flat_spread("mixed_tokens", self.mixed_tokens),
        }


def records_of(table: int, sources: Sources) -> list[Record]:
    """Returns the rows of a table, column by column in the paper's order."""
    cells = {(cell.row, cell.column): cell for cell in sources.cells if cell.table == table}
    rows = {row.row: row for row in sources.papers if row.table == table}
    records = []
    for column in dict.fromkeys(column for _, column in cells):
        for name in rows or dict.fromkeys(name for name, _ in cells):
            cell, row = cells.get((name, column)), rows.get(name)
            if cell is not None:
                records.append(_trained(cell, row, sources))
            elif row is not None and (top1 := getattr(row, PRINTED[column])) is not None:
                printed = _printed(row, top1, row.top5, sources)
                quoted = Record(table=table, row=name, column=column, status="quoted", **printed)
                records.append(quoted)
    return records


def _trained(cell: Cell, row: PaperRow | None, sources: Sources) -> Record:
    """Returns the record of a cell; `row` is its printed row in Tables 1 and 2."""
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
    """Returns the fields of Record with printed values, and our counts of the row's model."""
    paper = {"top1": top1, "top5": top5}
    if row is None:
        return {"paper": paper}
    sizes = {"parameters": row.parameters, "macs": row.macs}
    return {"paper": paper | sizes, "counts": sources.counts.get((row.table, row.row))}


def sweep_records(
    sweep: Sweep, cell: Cell, sources: Sources, has_mixing: bool
) -> Iterator[SweepRecord]:
    """Yields the baseline of the cell and all values; reads the mixing of HTM if `has_mixing`."""
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
        measured = _measured(name, None if is_own else sweep.experiment, collection)
        yield SweepRecord(
            row=f"{value} (as in Table {cell.table})" if is_own else value,
            column=cell.column,
            sweep=sweep,
            value=value,
            is_own=is_own,
            paper=cell.top1 if is_own else None,
            **measured,
            **(_mixing(measured["runs"], sources.outputs) if has_mixing else {}),
        )


def _mixing(runs: Sequence[str], outputs: Path) -> dict[str, Any]:
    """Returns the fields of SweepRecord on the mixing of HTM."""
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
    """Returns the fields of Measured for the configuration `name`, tested against `reference`."""
    runs = collection.cells.get(name)
    finished = [] if runs is None else list(runs.finished.values())
    results = tuple(run.result for run in finished if run.result is not None)
    comparison = None
    if reference and results:
        comparison = compare(_accuracies(name, collection), _accuracies(reference, collection))
    return {
        "status": _status(runs),
        "experiment": name,
        "spreads": {key: spread([r.accuracy[key] for r in results]) for key in METRICS if results},
        "comparison": comparison,
        "seeds": tuple(run.seed for run in finished),
        "results": results,
        "runs": tuple(run.folder for run in finished),
    }


def _accuracies(name: str, collection: Collection) -> dict[int, float]:
    """Returns the tested accuracy by seed."""
    finished = collection.cells.get(name, CellRuns()).finished
    return {seed: run.result.accuracy[TESTED] for seed, run in finished.items() if run.result}


def _status(runs: CellRuns | None) -> str:
    if runs is None:
        return "no configuration at this scale"
    parts = [f"{len(runs.finished)} finished"] if runs.finished else []
    parts += [f"seed {run.seed} {run.status}" for run in runs.others]
    return "; ".join(parts) or "not run"


def known(values: Iterable[Any]) -> list[Any]:
    """Returns the distinct values in order of appearance, without None."""
    return list(dict.fromkeys(value for value in values if value is not None))
