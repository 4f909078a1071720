"""Figure 4 as data: what HTM mixes over training, by seeds, and the regimes of their mean."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt, TypeAdapter, model_validator
from pydantic.dataclasses import dataclass as checked

from reproduction.reporting.curves import Epoch, read_epochs
from reproduction.reporting.regimes import LEAST_EPOCHS, Regimes, find_regimes
from reproduction.runs import RunFolder

DISTRIBUTION = "difficulty.json"  # in the folder of a finished run with HTM


@checked(frozen=True)
class Distribution:
    """How many of `images` have a difficulty between two `edges`, in nats; the last bin is open."""

    edges: list[NonNegativeFloat]
    counts: list[NonNegativeInt]
    images: PositiveInt

    @model_validator(mode="after")
    def _check(self) -> "Distribution":
        if len(self.edges) != len(self.counts) + 1 or sum(self.counts) != self.images:
            raise ValueError("edges, counts and images do not fit together")
        return self


@dataclass(frozen=True)
class Trace:
    """What one run tells; without a distribution, why it tells none."""

    seed: int
    epochs: list[Epoch]
    distribution: Distribution | str


def read_trace(folder: Path, seed: int) -> Trace:
    """Of a finished run with HTM; UserError if its metrics cannot be read."""
    return Trace(seed, read_epochs(RunFolder(folder).metrics_path), _distribution(folder))


def _distribution(folder: Path) -> Distribution | str:
    path = folder / DISTRIBUTION
    if not path.exists():
        return f"{DISTRIBUTION} is missing"
    try:
        return TypeAdapter(Distribution).validate_json(path.read_bytes())
    except (OSError, ValueError):
        return f"{DISTRIBUTION} cannot be read"


def regimes_of(traces: Sequence[Trace]) -> Regimes:
    """Of the mean over seeds."""
    return find_regimes(mean_of(traces, lambda epoch: epoch.mixed_samples).tolist())


def describe(regimes: Regimes, epochs: int) -> str:
    """The regimes in words, epochs counted from 1."""
    if epochs < LEAST_EPOCHS:
        return f"{epochs} epochs are too few to tell regimes"
    rise, convergence = regimes
    parts = ["no abrupt rise" if rise is None else f"abrupt rise after epoch {rise}"]
    parts += ["no convergence" if convergence is None else f"converged by epoch {convergence + 1}"]
    return ", ".join(parts)


def length(traces: Sequence[Trace]) -> int:
    """Epochs that all of them have."""
    return min(len(trace.epochs) for trace in traces)


def mean_of(traces: Sequence[Trace], value: Callable[[Epoch], float | None]) -> np.ndarray:
    """Over the seeds that have a value, of each epoch; nan where none has."""
    rows = np.array([values_of(trace, value)[: length(traces)] for trace in traces])
    known = np.isfinite(rows).sum(axis=0)
    return np.where(known, np.nansum(rows, axis=0) / np.maximum(known, 1), np.nan)


def values_of(trace: Trace, value: Callable[[Epoch], float | None]) -> list[float]:
    """One for each epoch, nan where it has none."""
    found = (value(epoch) for epoch in trace.epochs)
    return [math.nan if number is None else number for number in found]
