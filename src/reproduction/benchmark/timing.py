"""Times that can be compared: warm, in turns, the baseline twice."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

Work = Callable[[], object]
Row = dict[str, Any]

WARM_UP = 2  # rounds
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


def time_in_turns(works: Mapping[str, Work], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each work in every round; each round begins with the next one."""
    names = list(works)
    times: dict[str, list[float]] = {name: [] for name in names}
    for done in range(-WARM_UP, rounds):
        first = done % len(names)
        for name in [*names[first:], *names[:first]]:
            ms = _milliseconds(works[name])
            if done >= 0:
                times[name].append(ms)
    return times


def _milliseconds(work: Work) -> float:
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return 1000 * (time.perf_counter() - start)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def compared(works: Mapping[str, Work], rounds: int) -> dict[str, Row]:
    """Times of all works, and their ratios to the first one, taken round by round.

    A work called like the first one with `, again` is its twin; without one the first runs twice.
    Returns name -> `ms` and `ratio`, each with median and quartiles.
    """
    baseline, *others = works
    twin = works.get(baseline + AGAIN, works[baseline])
    order = [baseline, baseline + AGAIN, *(name for name in others if name != baseline + AGAIN)]
    times = time_in_turns({name: works.get(name, twin) for name in order}, rounds)
    return {
        name: {
            "ms": spread_of(ms)._asdict(),
            "ratio": spread_of([x / y for x, y in zip(ms, times[baseline], strict=True)])._asdict(),
        }
        for name, ms in times.items()
    }
