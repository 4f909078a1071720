"""The columns of a table as people read them: one text for each record."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from reproduction.reporting.cells import Cell
from reproduction.reporting.latency import Latency
from reproduction.reporting.records import Measured, Record
from reproduction.reporting.statistics import Spread, p_text

NOTHING = "-"
SHORT = 10  # digits of a git revision


@dataclass(frozen=True)
class Column:
    """A column as people read it; `is_printed` ones fit on a page of paper."""

    title: str
    text: Callable[[Any], str]  # of a record of the table
    is_printed: bool = True
    is_number: bool = True


def columns_of(
    cells: Sequence[Cell], is_papers: bool, has_top5: bool, has_sizes: bool, has_latency: bool
) -> Iterator[Column]:
    """The columns of a table; `cells` are those of all tables, to name baselines.

    Differences from the paper are those of its own experiments (`is_papers`) alone.
    """
    rows = {cell.experiment: cell for cell in cells}
    yield Column("row", lambda r: r.row, is_number=False)
    yield Column("status", lambda r: r.status, is_number=False)
    yield Column("n", lambda r: str(len(r.seeds)) if r.experiment else NOTHING)
    for kind, name in (("top1", "top-1"), *([("top5", "top-5")] if has_top5 else [])):
        metrics = [("last", "last"), ("median10", "median"), ("best", "best")]
        for suffix, word in metrics if kind == "top1" else [metrics[0], metrics[2]]:
            yield Column(f"{name} {word}", partial(_accuracy, f"{kind}_{suffix}"))
        yield Column(f"{name} paper", partial(_paper, kind))
        for suffix, word in (metrics[0], metrics[2]) if is_papers else ():
            yield Column(f"{name} {word} - paper", partial(_minus_paper, f"{kind}_{suffix}"))
    yield Column("difference", _difference)
    yield Column("p", _p_value)
    yield Column("to baseline", partial(_baseline, rows), is_printed=False, is_number=False)
    if has_sizes:
        yield Column("params (M) / paper", _parameters, is_printed=False)
        yield Column("MACs (G) / paper", _macs, is_printed=False)
    if has_latency:
        yield Column("latency (ms)", lambda r: _latency(r.latency))
        yield Column("latency paper (ms)", lambda r: _latency(r.paper_latency))


def sweep_columns(word: str, has_mixing: bool) -> Iterator[Column]:
    """The columns of a sweep over `word`; `has_mixing`: of HTM."""
    yield Column(word, lambda r: r.row, is_number=False)
    yield Column("status", lambda r: r.status, is_number=False)
    yield Column("n", lambda r: str(len(r.seeds)))
    for suffix, title in (("last", "last"), ("median10", "median"), ("best", "best")):
        yield Column(f"top-1 {title}", partial(_accuracy, f"top1_{suffix}"))
    yield Column("top-1 paper", lambda r: _plain(r.paper))
    yield Column("difference", _difference)
    yield Column("p", _p_value)
    if has_mixing:
        yield Column("mixed samples", lambda r: spread_text(r.mixed_samples))
        yield Column("mixed tokens", lambda r: spread_text(r.mixed_tokens))


def spread_text(found: Spread | None) -> str:
    """`82.87 +/- 0.12`, without a deviation for one value."""
    if found is None:
        return NOTHING
    return f"{found.mean:.2f}" + ("" if found.std is None else f" +/- {found.std:.2f}")


def short_revision(revision: str) -> str:
    """The first digits of a git revision, and `-dirty` if it is."""
    head, mark, dirty = revision.partition("-")
    return head[:SHORT] + mark + dirty


def _accuracy(metric: str, record: Measured) -> str:
    return spread_text(record.spreads.get(metric))


def _paper(kind: str, record: Record) -> str:
    return _plain(record.paper.get(kind))


def _minus_paper(metric: str, record: Record) -> str:
    return _signed(record.minus_paper(metric))


def _plain(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _signed(value: float | None) -> str:
    return NOTHING if value is None else f"{value:+.2f}"


def _difference(record: Measured) -> str:
    return _signed(None if record.comparison is None else record.comparison.difference)


def _p_value(record: Measured) -> str:
    test = record.comparison
    if test is None:
        return NOTHING
    if test.p is None:
        return f"none: {test.reason}"
    return f"{p_text(test.p)} ({len(test.seeds)} seeds)"


def _baseline(cells: Mapping[str, Cell], record: Record) -> str:
    if record.baseline is None:
        return "is a baseline" if record.experiment else NOTHING
    cell = cells[record.baseline]
    place = "" if cell.table == record.table else f"Table {cell.table}, "
    return f"{place}{cell.row}"


def _parameters(record: Record) -> str:
    ours = None if record.counts is None else record.counts.parameters / 1e6
    return f"{_plain(ours)} / {_as_printed(record, 'parameters')}"


def _macs(record: Record) -> str:
    counts = record.counts
    ours = NOTHING
    if counts is not None:
        ours = f"{counts.macs / 1e9:.2f} ({counts.macs_without_attention / 1e9:.2f})"
    return f"{ours} / {_as_printed(record, 'macs')}"


def _as_printed(record: Record, key: str) -> str:
    value = record.paper.get(key)
    return NOTHING if value is None else str(value)


def _latency(found: Latency | None) -> str:
    if found is None:
        return NOTHING
    known_quartiles = found.low_ms is not None and found.high_ms is not None
    quartiles = f" ({found.low_ms:.1f} to {found.high_ms:.1f})" if known_quartiles else ""
    ratio = "" if found.ratio is None else f", x{found.ratio:.1f}"
    return f"{found.ms:.1f}{quartiles}{ratio}"
