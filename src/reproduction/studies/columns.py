"""The columns of all tables, in order: what each reads from a run, its text, and where it is shown.

A new column is one entry of COLUMNS.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import pandas as pd

TESTED = "top1_last"  # percent, unless a study tests another one
# outcomes: all tables have their paired differences, in this form
COMPARED = {"top1_last": "+.2f", "loss_last": "+.3f", "top5_last": "+.2f"}
METRICS = ("top1_last", "top1_median10", "top1_best", "top5_last", "top5_best")
# of runs with a validation split, beside top1_last and top5_last, see docs/data.md
SELECTED = ("val_top1_last", "val_top1_selected", "top1_selected", "top5_selected")
LAST_EPOCHS = 10  # that were trained last, for `best of 10`
NOTHING = "-"
LONGEST_CELL = 80  # characters of a value
Summary = Mapping[str, Any]  # of a run: summary.json, or a line of results/
TableRow = Any  # of a table, as a named tuple


@dataclass(frozen=True)
class Column:
    """A column with the `text` of a row.

    `tables` has a letter for each kind that shows it: P the paper's tables, 5 those that print
    top-5, M the sizes of their models, S its sweeps, O studies of your own, L their second table, R
    the runs of a folder. With a `measure`, a number by this name is read from each run, by `read`
    or from summary.json; all tables have its `_mean` and `_std`.
    """

    title: str
    tables: str
    text: Callable[[TableRow], str]
    measure: str | None = None
    read: Callable[[Summary], Any] | None = None


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def form(value: Any, spec: str) -> str:
    return NOTHING if pd.isna(value) else format(value, spec)


def spread(row: TableRow, name: str, spec: str = ".2f") -> str:
    """Formats as `82.87 +/- 0.12`, as the mean alone of one seed, and `-` without runs."""
    mean, std = getattr(row, f"{name}_mean"), getattr(row, f"{name}_std")
    return form(mean, spec) + ("" if pd.isna(std) else f" +/- {std:{spec}}")


def has_htm(row: TableRow) -> bool:
    return "htm" in str(row.stack).split("+")


def difference(row: TableRow, name: str) -> str:
    """Formats as `-0.12`, and says so if HTM mixed no sample, or replaced no token in the end."""
    text = form(getattr(row, f"{name}_difference"), COMPARED[name])
    is_idle = has_htm(row) and 0 in (row.mixed_share_mean, row.mixed_tokens_mean)
    return f"{text} (mixed nothing)" if is_idle and text != NOTHING else text


def interval(row: TableRow, name: str) -> str:
    """Formats as `-0.31 to +1.20`."""
    low, high, spec = getattr(row, f"{name}_low"), getattr(row, f"{name}_high"), COMPARED[name]
    return NOTHING if pd.isna(low) else f"{low:{spec}} to {high:{spec}}"


def p_text(p: Any) -> str:
    """Formats with three decimals, or two significant digits below 0.001."""
    return NOTHING if pd.isna(p) else f"{p:.3f}" if p >= 0.001 else f"{p:.1e}"


def value_text(value: Any) -> str:
    """Formats a setting as on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(value_text, value))}]"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= LONGEST_CELL else f"{text[: LONGEST_CELL - 3]}..."


def _best_of_ten(summary: Summary) -> float | None:
    first, log = summary["epochs"] - LAST_EPOCHS, summary.get("log") or ()
    last = [line for line in log if line["epoch"] > first and "top1" in line]  # of the test set
    return max((line["top1"] for line in last), default=None)


def _loss(summary: Summary) -> float | None:
    log = summary.get("log") or [{}]
    return log[-1].get("eval_loss")  # None with a validation split, whose log has its own losses


def _below(row: TableRow) -> str:
    """Formats as `7 of 7` in how many pairs the loss is below that of the base."""
    return NOTHING if pd.isna(row.loss_last_below) else f"{row.loss_last_below:.0f} of {row.pairs}"


def _accuracy_untested(row: TableRow, text: Callable[[TableRow, str], str]) -> str:
    return NOTHING if row.tested == TESTED else text(row, TESTED)


def _mean(title: str, tables: str, name: str, read: Any = None, spec: str = ".2f") -> Column:
    return Column(title, tables, lambda row: spread(row, name, spec), name, read)


def _mixed(
    title: str, tables: str, text: Callable[[TableRow], str], name: str | None = None
) -> Column:
    return Column(title, tables, lambda row: text(row) if has_htm(row) else NOTHING, name)


def _number(title: str, tables: str, name: str, spec: str = ".2f") -> Column:
    return Column(title, tables, lambda row: form(getattr(row, name, None), spec))


COLUMNS = (
    Column("n", "PSOR", lambda row: "" if row.status == "quoted" else str(row.n)),
    _mean("last", "PSOR", TESTED),
    _mean("median", "PSO", "top1_median10"),
    _mean("best", "PSOR", "top1_best"),
    _mean("best of 10", "O", "top1_best10", _best_of_ten),
    _mean("validation", "OR", "val_top1_last"),
    _mean("validation, selected", "", "val_top1_selected"),
    _mean("selected", "R", "top1_selected"),
    _mean("top-5 selected", "", "top5_selected"),
    Column("top-5 last", "5", lambda row: spread(row, "top5_last")),
    _mean("top-5 best", "5", "top5_best"),
    _number("top-5 paper", "5", "paper_top5"),
    _mixed("mixed", "OR", lambda row: form(100 * row.mixed_share_mean, ".1f"), "mixed_share"),
    _mixed("tokens", "OR", lambda row: form(row.mixed_tokens_mean, ".1f")),
    Column("hours", "O", lambda row: form(row.seconds_mean * row.n / 3600, ".1f"), "seconds"),
    _number("quoted", "O", "paper_top1"),
    _number("paper", "PS", "paper_top1"),
    _number("last - paper", "PS", "top1_last_minus_paper", "+.2f"),
    _number("best - paper", "PS", "top1_best_minus_paper", "+.2f"),
    Column("pairs", "OL", lambda row: str(row.pairs or NOTHING)),
    Column("difference", "PSOR", lambda row: difference(row, row.tested)),
    Column("95 % interval", "OR", lambda row: interval(row, row.tested)),
    _number("paper's", "PS", "paper_difference", "+.2f"),
    Column("p", "PSOR", lambda row: p_text(row.test_p)),
    Column("p (Holm)", "PSOR", lambda row: row.role or p_text(row.test_p_holm)),
    _mean("loss", "L", "loss_last", _loss, ".3f"),
    Column("loss, difference", "L", lambda row: difference(row, "loss_last")),
    Column("95 % interval of loss", "L", lambda row: interval(row, "loss_last")),
    Column("lower in", "L", _below),
    _mean("top-5", "L", "top5_last"),
    Column("top-5, difference", "L", lambda row: difference(row, "top5_last")),
    Column("95 % interval of top-5", "L", lambda row: interval(row, "top5_last")),
    Column("top-1, difference", "L", lambda row: _accuracy_untested(row, difference)),
    Column("95 % interval of top-1", "L", lambda row: _accuracy_untested(row, interval)),
    _mixed("mixed samples", "S", lambda row: spread(row, "mixed_samples"), "mixed_samples"),
    _mixed("mixed tokens", "S", lambda row: spread(row, "mixed_tokens"), "mixed_tokens"),
    Column("parameters (M)", "M", lambda row: form(row.parameters / 1e6, ".2f")),
    _number("paper (M)", "M", "paper_parameters_m", ""),
    Column("MACs (G)", "M", lambda row: form(row.macs / 1e9, ".2f")),
    Column("without attention", "M", lambda row: form(row.macs_without_attention / 1e9, ".2f")),
    _number("paper (G)", "M", "paper_macs_g", ""),
    Column("status", "R", lambda row: row.status),
)
MEASURES = {column.measure: column for column in COLUMNS if column.measure is not None}


def measured(summary: Summary) -> dict[str, float]:
    """Returns the measures of a finished run that it has."""
    values = {
        name: summary.get(name) if column.read is None else column.read(summary)
        for name, column in MEASURES.items()
    }
    return {name: value for name, value in values.items() if is_number(value)}
