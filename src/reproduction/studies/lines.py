"""From runs to the lines of a table: means, deviations, paired tests over seeds.

A comparison is a pair of rows. Tests are two-sided paired t-tests over the seeds that both have,
corrected by Holm (1979).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any

import pandas as pd

from reproduction.identity import RowId
from reproduction.studies.results import Run

LEAST_PAIRS = 3  # for a test: two give an interval of 13 standard errors each way


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row before it has numbers."""

    id: RowId
    heads: dict[str, str]  # what names it, by the titles of columns
    key: str = ""  # of its runs; what is quoted has none
    against: RowId | None = None
    against_text: str = ""
    role: str = ""
    printed: Mapping[Any, float] = field(default_factory=dict)  # by measure
    printed_difference: float = nan
    state: str = ""


@dataclass(frozen=True, kw_only=True)
class Test:
    """A row less the one that it is compared with, over common seeds."""

    pairs: int
    difference: float
    below: int  # pairs in which the row is less
    low: float = nan  # of the 95 % interval
    high: float = nan
    p: float = nan


@dataclass(kw_only=True)
class Line:
    """A row with its numbers, judged by an outcome."""

    entry: Entry
    outcome: str
    runs: list[Run]
    results: pd.DataFrame  # outcomes and measures, by seed
    test: Test | None = None
    p: float = nan
    p_holm: float = nan

    @property
    def n(self) -> int:
        return len(self.runs)

    def values(self, name: str) -> pd.Series:
        """Returns an outcome or a measure, by seed."""
        if name not in self.results:
            return pd.Series(dtype=float)
        return self.results[name].dropna()

    def mean_of(self, name: str) -> float:
        return float(self.values(name).mean())

    @property
    def mean(self) -> float:
        return self.mean_of(self.outcome)

    @property
    def std(self) -> float:
        return float(self.values(self.outcome).std())


def lines_of(
    entries: Sequence[Entry], runs: Sequence[Run], outcome: str, is_tested: bool = True
) -> list[Line]:
    """Returns the lines of rows, judged by an outcome of these runs.

    A row that is `untested` has no p; one that is `primary` is not corrected for the others.
    """
    by_key = defaultdict[str, list[Run]](list)
    for run in runs:
        by_key[run.key].append(run)
    lines = {}
    for entry in entries:
        own = by_key[entry.key]
        results = pd.DataFrame.from_dict({run.seed: run.numbers for run in own}, orient="index")
        lines[entry.id] = Line(entry=entry, outcome=outcome, runs=own, results=results)

    family = {}  # p of the tests that are corrected for each other
    for line in lines.values():
        entry = line.entry
        if entry.against is None or lines[entry.against].entry.key == entry.key:
            continue
        line.test = paired(line.values(outcome), lines[entry.against].values(outcome))
        if is_tested and entry.role != "untested":
            line.p = line.test.p
            if not entry.role:
                family[entry.id] = line.p
    for row, adjusted in holm(pd.Series(family, dtype=float)).items():
        lines[row].p_holm = adjusted
    return [*lines.values()]


def paired(ours: pd.Series, base: pd.Series) -> Test:
    """Compares values by seed. A test needs three pairs whose differences are not all equal."""
    both = pd.DataFrame({"ours": ours, "base": base}).dropna()
    gap = both.ours - both.base
    test = Test(pairs=len(gap), difference=gap.mean(), below=int((gap < 0).sum()))
    if test.pairs < LEAST_PAIRS or gap.max() - gap.min() <= 1e-9:
        return test
    from scipy.stats import ttest_rel  # takes seconds to import

    found = ttest_rel(both.ours, both.base)
    low, high = found.confidence_interval()
    return replace(test, low=low, high=high, p=found.pvalue)


def holm(p: pd.Series) -> Mapping[RowId, float]:
    """Returns Holm's adjusted p-values of a family of tests."""
    ranked = p.dropna().sort_values(kind="stable")
    tests_left = [*range(len(ranked), 0, -1)]
    return dict((ranked * tests_left).clip(upper=1).cummax())
