"""Times that can be compared: warm, in turns of random order, the baseline twice."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import quantile_test

Work = Callable[[], object]
Row = dict[str, Any]

WARM_UP = 2  # rounds
CALLS_ON_GPU = 10  # between two synchronisations, as in training, where the host runs ahead
AGAIN = ", again"  # the baseline beside itself: the noise of every ratio


class Spread(NamedTuple):
    """Median and quartiles."""

    median: float
    low: float
    high: float


def spread_of(values: list[float]) -> Spread:
    """Rounded to 5 digits."""
    low, median, high = (float(f"{x:.5g}") for x in np.percentile(values, (25, 50, 75)))
    return Spread(median, low, high)


def summary(values: list[float]) -> Row:
    """Median, quartiles, and the 95 % confidence interval of the median.

    The interval is by order statistics; of fewer than 6 values it is their range.
    """
    found = quantile_test(values, p=0.5).confidence_interval(confidence_level=0.95)
    ends = [min(values), max(values)] if np.isnan(found).any() else [found.low, found.high]
    return {**spread_of(values)._asdict(), "interval": [float(f"{x:.5g}") for x in ends]}


def calls_on(device: torch.device) -> int:
    """How often work for this device is called between two looks at the clock."""
    return CALLS_ON_GPU if device.type == "cuda" else 1


def time_in_turns(works: Mapping[str, Work], rounds: int, calls: int = 1) -> dict[str, list[float]]:
    """Milliseconds of each work in every round, the mean of `calls`.

    Each round has an order of its own, so that none always follows the same other.
    """
    names = list(works)
    times: dict[str, list[float]] = {name: [] for name in names}
    rng = np.random.default_rng(0)
    for done in range(-WARM_UP, rounds):
        for name in map(names.__getitem__, rng.permutation(len(names))):
            ms = _milliseconds(works[name], calls)
            if done >= 0:
                times[name].append(ms)
    return times


def _milliseconds(work: Work, calls: int) -> float:
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize()
    return 1000 * (time.perf_counter() - start) / calls


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def compared(works: Mapping[str, Work], rounds: int, calls: int = 1) -> dict[str, Row]:
    """Times of all works, and their ratios to the first one, taken round by round.

    A work called like the first one with `, again` is its twin; without one the first runs twice.
    The twin is compared with the first, all others with the mean of both, which is less noisy.
    Returns name -> `ms` and `ratio`, each a `summary`.
    """
    baseline, *others = works
    twin = works.get(baseline + AGAIN, works[baseline])
    order = [baseline, baseline + AGAIN, *(name for name in others if name != baseline + AGAIN)]
    times = time_in_turns({name: works.get(name, twin) for name in order}, rounds, calls)
    alone = np.array(times[baseline])
    both = (alone + times[baseline + AGAIN]) / 2
    return {
        name: {
            "ms": summary(ms),
            "ratio": summary(list(ms / (alone if name in order[:2] else both))),
        }
        for name, ms in times.items()
    }
