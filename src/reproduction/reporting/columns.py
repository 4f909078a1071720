"""The columns of the tables: a title, and a function from a record to its text."""

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
LAST, MEDIAN, BEST = ("last", "last"), ("median", "median10"), ("best", "best")


@dataclass(frozen=True)
class Column:
    """A column of a table; LaTeX has only those with `is_printed`, to fit the page width."""

    title: str
    text: Callable[[Any], str]  # of a record
    is_printed: bool = True
    is_number: bool = True


def columns_of(
    cells: Sequence[Cell], is_papers: bool, has_top5: bool, has_sizes: bool, has_latency: bool
) -> Iterator[Column]:
    """Yields the columns of a table; `cells` are those of all tables, to name baselines.

    Differences from the paper appear only if the runs are its experiments (`is_papers`).
    """
    rows = {cell.experiment: cell for cell in cells}
    yield Column("row", lambda r: r.row, is_number=False)
    yield Column("status", lambda r: r.status, is_number=False)
    yield Column("n", lambda r: str(len(r.seeds)) if r.experiment else NOTHING)
    yield from _accuracies("top1", "top-1", (LAST, MEDIAN, BEST), is_papers)
    if has_top5:
        yield from _accuracies("top5", "top-5", (LAST, BEST), is_papers)
    yield Column("difference", _difference)
    yield Column("p", _p_value)
    yield Column("to baseline", partial(_baseline, rows), is_printed=False, is_number=False)
    if has_sizes:
        yield Column("params (M) / paper", _parameters, is_printed=False)
        yield Column("MACs (G) / paper", _macs, is_printed=False)
    if has_latency:
        yield Column("latency (ms)", lambda r: _latency(r.latency))
        yield Column("latency paper (ms)", lambda r: _latency(r.paper_latency))


def _accuracies(
    kind: str, name: str, metrics: Sequence[tuple[str, str]], is_papers: bool
) -> Iterator[Column]:
    """Yields our accuracies, the printed one, and the differences."""
    for word, suffix in metrics:
        yield Column(f"{name} {word}", partial(_accuracy, f"{kind}_{suffix}"))
    yield Column(f"{name} paper", lambda r: _number(r.paper.get(kind)))
    for word, suffix in (LAST, BEST) if is_papers else ():
        yield Column(f"{name} {word} - paper", partial(_minus_paper, f"{kind}_{suffix}"))


def sweep_columns(word: str, has_mixing: bool) -> Iterator[Column]:
    """Yields the columns of a sweep over the key `word`, with those of HTM if `has_mixing`."""
    yield Column(word, lambda r: r.row, is_number=False)
    yield Column("status", lambda r: r.status, is_number=False)
    yield Column("n", lambda r: str(len(r.seeds)))
    for title, suffix in (LAST, MEDIAN, BEST):
        yield Column(f"top-1 {title}", partial(_accuracy, f"top1_{suffix}"))
    yield Column("top-1 paper", lambda r: _number(r.paper))
    yield Column("difference", _difference)
    yield Column("p", _p_value)
    if has_mixing:
        yield Column("mixed samples", lambda r: spread_text(r.mixed_samples))
        yield Column("mixed tokens", lambda r: spread_text(r.mixed_tokens))


def spread_text(spread: Spread | None) -> str:
    """Formats a spread as `82.87 +/- 0.12`, or as its mean if there is one value."""
    if spread is None:
        return NOTHING
    return f"{spread.mean:.2f}" + ("" if spread.std is None else f" +/- {spread.std:.2f}")


def short_revision(revision: str) -> str:
    """Shortens the hash of a git revision, and keeps the suffix `-dirty`."""
    head, mark, dirty = revision.partition("-")
    return head[:SHORT] + mark + dirty


def _number(value: float | None, form: str = ".2f") -> str:
    return NOTHING if value is None else format(value, form)


def _accuracy(metric: str, record: Measured) -> str:
    return spread_text(record.spreads.get(metric))


def _minus_paper(metric: str, record: Record) -> str:
    return _number(record.minus_paper(metric), "+.2f")


def _difference(record: Measured) -> str:
    test = record.comparison
    return _number(None if test is None else test.difference, "+.2f")


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
    return cell.row if cell.table == record.table else f"Table {cell.table}, {cell.row}"


def _parameters(record: Record) -> str:
    ours = None if record.counts is None else record.counts.parameters / 1e6
    return f"{_number(ours)} / {_number(record.paper.get('parameters'), '')}"


def _macs(record: Record) -> str:
    counts, ours = record.counts, NOTHING
    if counts is not None:
        ours = f"{counts.macs / 1e9:.2f} ({counts.macs_without_attention / 1e9:.2f})"
    return f"{ours} / {_number(record.paper.get('macs'), '')}"


def _latency(latency: Latency | None) -> str:
    if latency is None:
        return NOTHING
    low, high, ratio = latency.low_ms, latency.high_ms, latency.ratio
    quartiles = "" if low is None or high is None else f" ({low:.1f} to {high:.1f})"
    return f"{latency.ms:.1f}{quartiles}" + ("" if ratio is None else f", x{ratio:.1f}")
