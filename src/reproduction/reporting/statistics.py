"""Mean and deviation over seeds, the paired t-test between two cells, and Holm's correction."""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from scipy.stats import ttest_rel

LEAST_SEEDS = 2
SAME = 1e-9  # percent: smaller differences count as equal


class Spread(NamedTuple):
    """Mean and sample standard deviation (n - 1 in the denominator; None for n = 1)."""

    mean: float
    std: float | None
    n: int


class Comparison(NamedTuple):
    """A cell against its baseline, over their common seeds.

    `difference` is the mean of cell - baseline in percent, None without a common seed. `p` is
    two-sided; if it is None, `reason` says why.
    """

    seeds: tuple[int, ...]
    difference: float | None = None
    t: float | None = None
    p: float | None = None
    reason: str | None = None


def spread(values: Sequence[float]) -> Spread:
    """Raises ValueError if there are no values."""
    if not values:
        raise ValueError("no values to take the mean of")
    std = stdev(values) if len(values) > 1 else None
    return Spread(fmean(values), std, len(values))


def flat_spread(name: str, spread: Spread | None) -> dict[str, float | None]:
    """Returns the values by the names of their columns in files."""
    return {f"{name}_mean": spread and spread.mean, f"{name}_std": spread and spread.std}


def compare(ours: Mapping[int, float], baseline: Mapping[int, float]) -> Comparison:
    """Tests percentages by seed against those of the baseline: two-sided paired t-test."""
    seeds = tuple(sorted(ours.keys() & baseline.keys()))
    differences = [ours[seed] - baseline[seed] for seed in seeds]
    mean = fmean(differences) if differences else None
    if len(seeds) < LEAST_SEEDS:
        reason = f"needs {LEAST_SEEDS} common seeds, has {len(seeds)}"
        return Comparison(seeds, mean, reason=reason)
    if max(differences) - min(differences) < SAME:
        is_zero = abs(fmean(differences)) < SAME
        reason = "values are identical" if is_zero else "all differences are equal"
        return Comparison(seeds, mean, reason=reason)
    test = ttest_rel([ours[seed] for seed in seeds], [baseline[seed] for seed in seeds])
    return Comparison(seeds, mean, float(test.statistic), float(test.pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns Holm's (1979) adjusted p-values of a family of tests, in their order."""
    adjusted, largest = list(p_values), 0.0
    for rank, test in enumerate(sorted(range(len(adjusted)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(adjusted) - rank) * p_values[test]))
        adjusted[test] = largest
    return adjusted


def p_text(p: float) -> str:
    """Formats with three decimals, or two significant digits below 0.001."""
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1e}"
