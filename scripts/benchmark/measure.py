"""Sizes of the benchmarks; comparison of times with a repeated baseline; peak memory."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from scipy.stats import quantile_test
from torch.profiler import ProfilerActivity, profile

from reproduction.system.errors import UserError
from scripts.benchmark.timing import Work, spread_of, time_in_turns
from scripts.benchmark.trainers import CCT, TRAINED_AS, VIT

Row = dict[str, Any]
Group = dict[str, Any]  # title, about, rows; see report.py

CALLS_ON_GPU = 10  # between two synchronisations, as in training, where the host runs ahead
AGAIN = ", again"  # suffix of the repeated baseline, which shows the noise of the ratios

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler warns if there is no GPU


def calls_on(device: torch.device) -> int:
    """Number of calls on this device per reading of the clock."""
    return CALLS_ON_GPU if device.type == "cuda" else 1


def summarize(values: list[float]) -> Row:
    """Median, quartiles, and the 95 % confidence interval of the median.

    The interval is by order statistics; for fewer than 6 values it is their range.
    """
    interval = quantile_test(values, p=0.5).confidence_interval(confidence_level=0.95)
    ends = [interval.low, interval.high]
    if np.isnan(ends).any():
        ends = [min(values), max(values)]
    return {**spread_of(values)._asdict(), "interval": [float(f"{x:.5g}") for x in ends]}


def compare(works: Mapping[str, Work], rounds: int, calls: int = 1) -> dict[str, Row]:
    """Times all works and returns name -> `ms` and `ratio`, each a summary over the rounds.

    The first work is the baseline. Its twin, the work named `<baseline>, again`, defaults to the
    baseline itself. Ratios are taken within each round: the twin's to the baseline, all others' to
    the mean of both, which has less noise.
    """
    baseline = next(iter(works))
    twin = baseline + AGAIN
    timed = {baseline: works[baseline], twin: works[baseline], **works}
    times = time_in_turns(timed, rounds, calls)
    alone = np.array(times[baseline])
    mean = (alone + times[twin]) / 2
    return {
        name: {
            "ms": summarize(ms),
            "ratio": summarize(list(ms / (alone if name in (baseline, twin) else mean))),
        }
        for name, ms in times.items()
    }


def peak_mib(work: Work, device: torch.device) -> float:
    """Peak memory of torch's tensors during `work`, in addition to that held before.

    A GPU's allocator counts it; on a CPU the profiler records every allocation. Host memory of
    other libraries is not included.
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
    assert record.profiler is not None
    events = [x for x in record.profiler.kineto_results.events() if x.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes, initial=0)) / 2**20


Size = tuple[str, int]  # model, batch


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Sizes and numbers of rounds.

    `pairs`: rounds of comparisons; `few`: rounds of what is slow or varies little. `steps`,
    `oracle` and `batches`: models and batch sizes of the training steps; `compiling`: the values
    of `compile` for `steps`. `detectors`: batch size of the detectors, parts and attention. `gain`:
    samples and tokens of the gain matrix. `matrix`: rows of the product that measures the matrix
    rate. `images`: batch size of the pipeline; `workers`: numbers of loading workers for the steps
    of `loading`, models.
    """

    pairs: int = 40
    few: int = 10
    steps: tuple[Size, ...] = (("cct_2_3x2", 128), (CCT, 16), (VIT, 4))
    compiling: tuple[str, ...] = ("false",)
    oracle: tuple[Size, ...] = ((CCT, 16),)
    batches: tuple[Size, ...] = ((CCT, 8), (CCT, 32))
    detectors: int = 128
    gain: tuple[int, int] = (504, 196)
    matrix: int = 2048
    images: int = 64
    loading: tuple[str, ...] = (CCT, VIT)
    workers: tuple[int, ...] = ()


ON_CPU = Scope()
ON_GPU = Scope(
    steps=(("cct_2_3x2", 128), (CCT, 128), (VIT, 128)),
    compiling=("false", "true", "reduce-overhead"),
    oracle=((CCT, 128), (VIT, 128)),
    batches=tuple((model, b) for model in (CCT, VIT) for b in (128, 256, 504, 1024)),
    matrix=8192,
    images=128,
    workers=(4, 8, 16),
)
QUICK = Scope(
    pairs=2,
    few=1,
    steps=(("cct_2_3x2", 4),),
    oracle=(("cct_2_3x2", 4),),
    batches=(("cct_2_3x2", 2),),
    detectors=2,
    gain=(12, 16),
    matrix=64,
    images=2,
    loading=("cct_2_3x2",),
    workers=(0,),
)


def parse_sizes(texts: Sequence[str]) -> tuple[Size, ...]:
    """Parses MODEL:BATCH; UserError for an unknown model or a batch below 2."""
    sizes = []
    for text in texts:
        model, _, batch = text.partition(":")
        if model not in TRAINED_AS:
            raise UserError(f"sizes={text}: the model must be one of {', '.join(TRAINED_AS)}")
        if not batch.isdecimal() or int(batch) < 2:
            raise UserError(f"sizes={text}: must be MODEL:BATCH, with a batch of 2 or more")
        sizes.append((model, int(batch)))
    return tuple(sizes)
