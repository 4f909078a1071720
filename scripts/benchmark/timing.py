"""Timing of callables: interleaved in random order, after warm-up."""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

Work = Callable[[], object]

WARM_UP = 2  # rounds


class Spread(NamedTuple):
    """Median and quartiles."""

    median: float
    low: float
    high: float


def spread_of(values: list[float]) -> Spread:
    """Returns median and quartiles, rounded to 5 digits."""
    low, median, high = (float(f"{x:.5g}") for x in np.percentile(values, (25, 50, 75)))
    return Spread(median, low, high)


def time_in_turns(works: Mapping[str, Work], rounds: int, calls: int = 1) -> dict[str, list[float]]:
    """Returns the milliseconds per call of each work in every round, averaged over `calls`.

    The order is shuffled in each round, so that no work always follows the same other.
    """
    names = list(works)
    times: dict[str, list[float]] = {name: [] for name in names}
    rng = np.random.default_rng(0)
    for round_ in range(-WARM_UP, rounds):
        for name in map(names.__getitem__, rng.permutation(len(names))):
            ms = 1000 * time_calls(works[name], calls) / calls
            if round_ >= 0:
                times[name].append(ms)
    return times


def time_calls(work: Work, calls: int = 1) -> float:
    """Returns the seconds of `calls` calls, including their GPU work."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
