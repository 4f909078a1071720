"""How much is measured, and times and peak memory that can be compared: the baseline runs twice."""

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
    baseline = next(iter(works))
    twin = baseline + AGAIN
    timed = {baseline: works[baseline], twin: works[baseline], **works}
    times = time_in_turns(timed, rounds, calls)
    alone = np.array(times[baseline])
    both = (alone + times[twin]) / 2
    return {
        name: {
            "ms": summary(ms),
            "ratio": summary(list(ms / (alone if name in (baseline, twin) else both))),
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
    """Sizes and rounds.

    `pairs`: rounds of whatever is compared; `starts`: of processes and batches of the pipeline.
    `steps`, `oracle`: models and batches of the training steps. `detectors`: batch of the detectors
    and parts. `gain`: samples and tokens of the gain matrix, whose growth goes through
    `gain_samples` at `gain[1]` tokens, and `gain_tokens` at `detectors` samples. `matrix`: rows of
    the product that tells the matrix rate. `images`: of a batch of the pipeline.
    `compiled`: whether steps are measured compiled as well.
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


def sizes_of(texts: Sequence[str]) -> tuple[Size, ...]:
    """MODEL:BATCH as typed; UserError for another model, and for a batch below 2."""
    sizes = []
    for text in texts:
        model, _, batch = text.partition(":")
        if model not in TRAINED_AS:
            raise UserError(f"sizes={text}: the model must be one of {', '.join(TRAINED_AS)}")
        if not batch.isdecimal() or int(batch) < 2:
            raise UserError(f"sizes={text}: must be MODEL:BATCH, with a batch of 2 or more")
        sizes.append((model, int(batch)))
    return tuple(sizes)
