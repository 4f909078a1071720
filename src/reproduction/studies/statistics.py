"""From runs to the lines of a table: means, deviations, paired tests over seeds.

A comparison is a pair of rows. Tests are two-sided paired t-tests over the seeds that both have,
corrected by Holm (1979).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import nan
from typing import Any

import pandas as pd

from reproduction.studies.runs import Outcome, Run

LEAST_PAIRS = 3  # for a test: with two, the 95 % interval is +-12.7 standard errors
ROUNDING = 1e-9  # in points or nats: differences that differ by less are equal


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row before it has numbers. What is known of it stays a value: text is made last."""

    key: str  # which no other row of its table has
    heads: Mapping[str, Any]  # what is shown of it, by the titles of columns, which all rows share
    study: str = ""
    name: str = ""  # in its study
    values: Mapping[str, Any] = field(default_factory=dict)  # of settings in which it differs
    column: str = ""  # the title of the part of the table that has it
    row_hash: str = ""  # of its runs; a row that is quoted has none
    against: str | None = None  # the key of a row of other runs
    against_text: str = ""
    role: str = ""
    printed: Mapping[Any, float] = field(default_factory=dict)  # by measure, on the test set
    status_text: str = ""


@dataclass(kw_only=True)
class Comparison:
    """The difference of a row from another one, over the seeds that both have."""

    printed_difference: float = nan  # the paper's
    pairs: float = nan
    difference: float = nan
    below: float = nan  # pairs in which the row is less
    low: float = nan  # of the 95 % interval
    high: float = nan
    p: float = nan
    p_holm: float = nan
    untestable: str = ""  # why there is no interval and no p, although there are pairs


@dataclass(kw_only=True)
class Line:
    """A row with its numbers, judged by an outcome."""

    row: Row
    outcome: Outcome
    is_main: bool  # the table is about this outcome, and has p of no other
    runs: list[Run]
    comparison: Comparison = field(default_factory=Comparison)

    @property
    def n(self) -> int:
        """How many runs have its outcome."""
        return len(self.judged)

    def values(self, outcome: Outcome) -> pd.Series:
        """Returns the values of an outcome, by seed."""
        return pd.Series({run.seed: run.outcomes.get(outcome, nan) for run in self.runs}).dropna()

    def measured(self, name: str) -> pd.Series:
        """Returns the values of a measure, by seed."""
        return pd.Series({run.seed: run.measures.get(name, nan) for run in self.runs}).dropna()

    def mean_of(self, measure: str) -> float:
        return float(self.measured(measure).mean())

    @cached_property
    def judged(self) -> pd.Series:
        """The values of its outcome, by seed."""
        return self.values(self.outcome)

    @property
    def mean(self) -> float:
        return float(self.judged.mean())

    @property
    def std(self) -> float:
        return float(self.judged.std())

    @property
    def printed(self) -> float:
        """The paper's value of its outcome; on a validation split it has none."""
        if self.outcome.split == "validation":
            return nan
        return self.row.printed.get(self.outcome.measure, nan)


def lines_of(
    rows: Sequence[Row], runs: Sequence[Run], outcome: Outcome, is_main: bool = True
) -> list[Line]:
    """Returns the lines of rows, judged by an outcome of these runs.

    A row that is `untested` has no p; one that is `primary` is not corrected for the others.
    """
    lines = {}
    for row in rows:
        own = [run for run in runs if run.row_hash == row.row_hash]
        lines[row.key] = Line(row=row, outcome=outcome, is_main=is_main, runs=own)

    family = {}  # p of the tests that are corrected for each other
    for line in lines.values():
        row = line.row
        if row.against is None:
            continue
        base = lines[row.against]
        line.comparison = paired(line.judged, base.judged)
        line.comparison.printed_difference = line.printed - base.printed
        if row.role == "untested" or not is_main:
            line.comparison.p = nan
        elif not row.role:
            family[row.key] = line.comparison.p
    adjusted = holm(pd.Series(family, dtype=float))
    for key in adjusted.index:
        lines[key].comparison.p_holm = adjusted[key]
    return [*lines.values()]


def paired(ours: pd.Series, base: pd.Series) -> Comparison:
    """Compares values by seed. A test needs three pairs whose differences are not all equal."""
    both = pd.DataFrame({"ours": ours, "base": base}).dropna()
    gap = both.ours - both.base
    found = Comparison(pairs=len(gap), difference=gap.mean(), below=int((gap < 0).sum()))
    if 0 < len(gap) < LEAST_PAIRS:
        found.untestable = f"needs {LEAST_PAIRS} pairs"
    elif not gap.empty and gap.max() - gap.min() <= ROUNDING:
        found.untestable = "equal differences"
    elif not gap.empty:
        from scipy.stats import ttest_rel  # takes seconds to import

        test = ttest_rel(both.ours, both.base)
        found.low, found.high = test.confidence_interval()
        found.p = test.pvalue
    return found


def holm(p: pd.Series) -> pd.Series:
    """Returns Holm's adjusted p-values of a family of tests."""
    ranked = p.dropna().sort_values(kind="stable")
    tests_left = [*range(len(ranked), 0, -1)]
    return (ranked * tests_left).clip(upper=1).cummax()
