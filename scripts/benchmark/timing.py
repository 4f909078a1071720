"""Timing of callables in turns, in random order, after a warm-up; ratios within each round."""

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import quantile_test

Work = Callable[[], object]
Measured = dict[str, Any]

WARM_UP_ROUNDS = 2  # rounds
CALLS_ON_GPU = 10  # between two synchronisations, as in training, where the host runs ahead


class Spread(NamedTuple):
    """Median and quartiles."""

    median: float
    low: float
    high: float


def spread_of(values: list[float]) -> Spread:
    """Returns median and quartiles, rounded to 5 digits."""
    low, median, high = (float(f"{x:.5g}") for x in np.percentile(values, (25, 50, 75)))
    return Spread(median, low, high)


def summarize(values: list[float]) -> Measured:
    """Median, quartiles, and the 95 % confidence interval of the median.

    The interval is by order statistics; for fewer than 6 values it is their range.
    """
    interval = quantile_test(values, p=0.5).confidence_interval(confidence_level=0.95)
    ends = [interval.low, interval.high]
    if np.isnan(ends).any():
        ends = [min(values), max(values)]
    return {**spread_of(values)._asdict(), "interval": [float(f"{x:.5g}") for x in ends]}


def turns(works: Mapping[str, Work], calls: int = 1) -> Iterator[dict[str, float]]:
    """Yields the milliseconds per call of each work, averaged over `calls`, round by round.

    The order is shuffled in each round, so that no work always follows the same other.
    """
    names = list(works)
    rng = np.random.default_rng(0)
    for round_ in range(-WARM_UP_ROUNDS, 2**31):
        order = [names[i] for i in rng.permutation(len(names))]
        times = {name: 1000 * time_calls(works[name], calls) / calls for name in order}
        if round_ >= 0:
            yield {name: times[name] for name in names}


def time_in_turns(works: Mapping[str, Work], rounds: int, calls: int = 1) -> dict[str, list[float]]:
    """Returns the milliseconds of each work in every round."""
    times = [*islice(turns(works, calls), rounds)]
    return {name: [each[name] for each in times] for name in works}


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


def calls_on(device: torch.device) -> int:
    """Number of calls on this device per reading of the clock."""
    return CALLS_ON_GPU if device.type == "cuda" else 1


def peak_mib(work: Work) -> float:
    """Peak memory of torch's tensors on the GPU during `work`, beyond that held before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
