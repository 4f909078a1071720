"""Times and peak memory that can be compared: the baseline runs twice."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import quantile_test
from torch.profiler import ProfilerActivity, profile

from reproduction.system.timing import Work, spread_of, time_in_turns

Row = dict[str, Any]

CALLS_ON_GPU = 10  # between two synchronisations, as in training, where the host runs ahead
AGAIN = ", again"  # the baseline beside itself: the noise of every ratio

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler complains where there is no GPU


def calls_on(device: torch.device) -> int:
    """How often work for this device is called between two looks at the clock."""
    return CALLS_ON_GPU if device.type == "cuda" else 1


def summary(values: list[float]) -> Row:
    """Median, quartiles, and the 95 % confidence interval of the median.

    The interval is by order statistics; of fewer than 6 values it is their range.
    """
    found = quantile_test(values, p=0.5).confidence_interval(confidence_level=0.95)
    ends = [min(values), max(values)] if np.isnan(found).any() else [found.low, found.high]
    return {**spread_of(values)._asdict(), "interval": [float(f"{x:.5g}") for x in ends]}


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


def peak_mib(work: Work, device: torch.device) -> float:
    """The most that torch's tensors hold during `work`, beyond what they held when it began.

    On a GPU by the allocator's own count, on a CPU by the profiler's record of every allocation;
    what other libraries allocate on the host is not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    held = peak = 0
    for change in _changes(record):
        held += change
        peak = max(peak, held)
    return peak / 2**20


def _changes(record: profile) -> list[int]:
    """Bytes taken and given back, in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = [event for event in events if event["name"] == "[memory]"]
    return [event["args"]["Bytes"] for event in sorted(memory, key=lambda event: event["ts"])]
