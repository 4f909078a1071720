"""Statistics of paired values by their definitions, without the code of the tables."""

from collections.abc import Mapping
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t


def gaps_of(ours: Mapping[int, float], base: Mapping[int, float]) -> list[float]:
    """The differences at the seeds that both have."""
    return [value - base[seed] for seed, value in ours.items() if seed in base]


def error_of(gaps: list[float]) -> float:
    """The standard error of the mean."""
    return stdev(gaps) / len(gaps) ** 0.5


def interval(gaps: list[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean, by Student's t."""
    half = float(t.ppf(0.975, len(gaps) - 1)) * error_of(gaps)
    mean = fmean(gaps)
    return mean - half, mean + half


def p_of(gaps: list[float]) -> float:
    """The p of the paired t-test."""
    value = abs(fmean(gaps)) / error_of(gaps)
    return float(2 * t.sf(value, len(gaps) - 1))


def holm(p: Mapping[Any, float]) -> dict[Any, float]:
    """The adjusted p-values of Holm (1979)."""
    adjusted: dict[Any, float] = {}
    largest = 0.0
    for place, name in enumerate(sorted(p, key=p.__getitem__)):
        step = (len(p) - place) * p[name]
        largest = max(largest, min(1.0, step))
        adjusted[name] = largest
    return adjusted
