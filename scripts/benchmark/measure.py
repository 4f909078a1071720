"""Sizes of the benchmarks; comparison of times with a repeated baseline; peak memory."""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import quantile_test
from torch.profiler import ProfilerActivity, profile

from reproduction.system.errors import UserError
from reproduction.system.timing import Work, spread_of, time_in_turns

Row = dict[str, Any]

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
    held = peak = 0
    for change in _memory_changes(record):
        held += change
        peak = max(peak, held)
    return peak / 2**20


def _memory_changes(record: profile) -> list[int]:
    """Bytes allocated (positive) and freed (negative), in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = [event for event in events if event["name"] == "[memory]"]
    return [event["args"]["Bytes"] for event in sorted(memory, key=lambda event: event["ts"])]


CCT, VIT = "cct_7_3x1", "vit_base_patch16_224"
Size = tuple[str, int]  # model, batch
# model -> data set, recipe, classes
TRAINED_AS = {
    "cct_2_3x2": ("digits", "quickstart", 10),
    CCT: ("cifar100", "cifar_cct", 100),
    VIT: ("imagenet1k", "imagenet_vit", 1000),
}


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Sizes and numbers of rounds.

    `pairs`: rounds of comparisons; `starts`: rounds of processes and of the input pipeline.
    `steps`, `oracle`: models and batch sizes of the training steps. `detectors`: batch size of the
    detectors and parts. `gain`: samples and tokens of the gain matrix, whose growth is measured
    over `gain_samples` at `gain[1]` tokens and over `gain_tokens` at `detectors` samples.
    `matrix`: rows of the product that measures the matrix rate. `images`: batch size of the
    pipeline. `compiled`: whether to measure compiled steps as well.
    """

    pairs: int = 40
    starts: int = 10
    steps: tuple[Size, ...] = (("cct_2_3x2", 128), (CCT, 16), (VIT, 4))
    oracle: tuple[Size, ...] = ((CCT, 16),)
    detectors: int = 128
    gain: tuple[int, int] = (504, 196)
    gain_samples: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    gain_tokens: tuple[int, ...] = (64, 128, 256, 512, 1024)
    matrix: int = 2048
    images: int = 64
    compiled: bool = False


ON_CPU = Scope()
ON_GPU = Scope(
    steps=(("cct_2_3x2", 128), (CCT, 128), (VIT, 128)),
    oracle=((CCT, 128), (VIT, 128)),
    matrix=8192,
    compiled=True,
)
QUICK = Scope(
    pairs=2,
    starts=1,
    steps=(("cct_2_3x2", 4),),
    oracle=(("cct_2_3x2", 4),),
    detectors=2,
    gain=(12, 16),
    gain_samples=(8, 16, 32),
    gain_tokens=(8, 16, 32),
    matrix=64,
    images=2,
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
