"""Mean and deviation over seeds, the paired t-test between two cells, Holm's correction. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.stats import ttest_rel

LEAST_SEEDS = 2
SAME = 1e-9  # percent: differences closer than this are one value


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (n - 1 in the denominator; None for n = 1)."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True)
class Comparison:
    """A cell against its baseline, over the seeds that both have.

    `difference` is the mean of cell - baseline in percent (None without a common seed); `p` is
    two-sided, and None for the `reason` given.
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


def flat_spread(name: str, found: Spread | None) -> dict[str, float | None]:
    """For a file."""
    return {
        f"{name}_mean": None if found is None else found.mean,
        f"{name}_std": None if found is None else found.std,
    }


def compare(ours: Mapping[int, float], baseline: Mapping[int, float]) -> Comparison:
    """Two-sided paired t-test of seed -> percent against the baseline's seed -> percent."""
    seeds = tuple(sorted(ours.keys() & baseline.keys()))
    differences = [ours[seed] - baseline[seed] for seed in seeds]
    if len(seeds) < LEAST_SEEDS:
        reason = f"needs {LEAST_SEEDS} common seeds, has {len(seeds)}"
        return Comparison(seeds, fmean(differences) if differences else None, reason=reason)
    mean = fmean(differences)
    if max(differences) - min(differences) < SAME:
        same = "values are identical" if abs(mean) < SAME else "all differences are equal"
        return Comparison(seeds, mean, reason=same)
    test = ttest_rel([ours[seed] for seed in seeds], [baseline[seed] for seed in seeds])
    return Comparison(seeds, mean, float(test.statistic), float(test.pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) adjusted p-values of a family of tests, in their order."""
    adjusted, largest = list(p_values), 0.0
    for rank, test in enumerate(sorted(range(len(adjusted)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(adjusted) - rank) * p_values[test]))
        adjusted[test] = largest
    return adjusted


def p_text(p: float) -> str:
    """Three digits after the point, or two significant ones where those would be zeros."""
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1e}"
