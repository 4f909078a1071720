"""Curves over training, and Figure 4 as data: what HTM mixes by seeds, and the regimes of it.

metrics.jsonl is read as a stream, since a run has up to a million batches.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, islice, takewhile
from math import nan
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt, TypeAdapter, model_validator
from pydantic.dataclasses import dataclass as checked

from reproduction.runs.folder import RunFolder
from reproduction.system.errors import UserError, first_line
from reproduction.system.reading import parse_json

BLOCK = 2**16  # bytes that are read at a time from the end
DISTRIBUTION = "difficulty.json"  # in the folder of a finished run with HTM
LEAST_EPOCHS = 20  # of a curve that has regimes

Line = dict[str, Any]


class Epoch(NamedTuple):
    """Means over the batches of an epoch; `mixed_tokens` is None where no sample was mixed."""

    epoch: int
    mixed_samples: float  # in a batch
    mixed_tokens: float | None  # in a mixed sample
    difficulty: float  # nats; nan from augmentation.off_epoch on


def read_epochs(path: Path) -> list[Epoch]:
    """The epochs of a run with HTM; UserError if `path` cannot be read or holds none."""
    with _reading(path), path.open("rb") as file:
        whole = (line for line in file if line.endswith(b"\n"))
        found = [
            _means(lines) for _, lines in groupby(_in_order(_batches(whole)), itemgetter("epoch"))
        ]
    if not found:
        raise UserError(f"{path.name}: holds no batches")
    return found


def last_epoch(path: Path) -> Epoch:
    """The last one of them, without reading the others."""
    with _reading(path):
        batches = _batches(islice(lines_backwards(path), 1, None))  # what follows the last line
        last = next(batches, None)
        if last is not None:
            same = takewhile(lambda line: line["epoch"] == last["epoch"], batches)
            return _means([last, *same])
    raise UserError(f"{path.name}: holds no batches")


def lines_backwards(path: Path) -> Iterator[bytes]:
    """The lines of a file from the last to the first, without reading more than is asked for."""
    rest = b""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - BLOCK)
            file.seek(start)
            rest, *lines = (file.read(end - start) + rest).split(b"\n")
            yield from reversed(lines)
            end = start
    yield rest


def running_mean(values: Sequence[float], window: int) -> np.ndarray:
    """The mean over `window` values around each one, over fewer at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    place = np.arange(len(values)) - window // 2
    first, end = np.maximum(place, 0), np.minimum(place + window, len(values))
    return (sums[end] - sums[first]) / (end - first)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns what a damaged file raises into a UserError that names it."""
    try:
        yield
    except OSError as error:  # without the path, which would tell the report's readers nothing
        raise UserError(f"{path.name}: not readable: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{path.name}: not readable: {first_line(error)}") from error


def _batches(lines: Iterable[bytes]) -> Iterator[Line]:
    """The lines of batches that were learned from, without those of whole epochs."""
    rows = (parse_json(line) for line in lines if line.strip())
    return (row for row in rows if "step" in row and not row.get("skipped"))


def _in_order(batches: Iterable[Line]) -> Iterator[Line]:
    """ValueError where a step comes twice or too early, as in two files put together."""
    last = 0
    for line in batches:
        if line["step"] <= last:
            raise ValueError(f"step {line['step']} comes after step {last}")
        last = line["step"]
        yield line


def _means(lines: Iterable[Line]) -> Epoch:
    batches = list(lines)
    mixed = sum(line["mixed_samples"] for line in batches)
    tokens = sum(line["mixed_tokens"] * line["mixed_samples"] for line in batches)
    return Epoch(
        batches[0]["epoch"],
        mixed / len(batches),
        tokens / mixed if mixed else None,
        fmean(nan if (nats := line["difficulty"]) is None else nats for line in batches),
    )


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


def length(traces: Sequence[Trace]) -> int:
    """Epochs that all of them have."""
    return min(len(trace.epochs) for trace in traces)


def mean_of(traces: Sequence[Trace], value: Callable[[Epoch], float | None]) -> np.ndarray:
    """Over the seeds that have a value, of each epoch; nan where none has."""
    rows = np.array([values_of(trace, value)[: length(traces)] for trace in traces])
    known = np.isfinite(rows).sum(axis=0)
    return np.where(known, np.nansum(rows, axis=0) / np.maximum(known, 1), np.nan)


def values_of(trace: Trace, value: Callable[[Epoch], float | None]) -> np.ndarray:
    """One for each epoch, nan where it has none."""
    return np.array([value(epoch) for epoch in trace.epochs], dtype=float)


class Regimes(NamedTuple):
    """Index of the first epoch of (B) and of (C); None where the curve does not show it."""

    rise: int | None
    convergence: int | None


def find_regimes(mixed_samples: Sequence[float]) -> Regimes:
    """From the mean of mixed samples of each epoch.

    (A) few samples are mixed at first. It ends where the curve has gone a fifth of the way from
        its first value to its final level, the mean of the last tenth, for good. There is such a
        rise only if the first value is less than half of the final level, and an abrupt one only
        if the curve has gone two fifths of the way, for good, within a twentieth of all epochs.
    (B) goes on from there, with slow growth.
    (C) begins where the curve has settled: from there on its running mean over a twentieth of all
        epochs stays within 5 % of the final level. It is convergence if that holds for the last
        quarter of training at least, and not from the first epoch on.

    A curve of fewer than LEAST_EPOCHS has neither boundary.
    """
    curve = np.asarray(mixed_samples, dtype=float)
    if len(curve) < LEAST_EPOCHS:
        return Regimes(None, None)
    level = float(curve[-(len(curve) // 10) :].mean())
    return Regimes(_rise(curve, level), _convergence(curve, level))


def _rise(curve: np.ndarray, level: float) -> int | None:
    first = float(curve[0])
    if first >= level / 2:
        return None
    begun, gone = (_for_good(curve >= first + way * (level - first)) for way in (0.2, 0.4))
    if begun is None or gone is None or gone - begun > len(curve) // 20:
        return None
    return begun


def _convergence(curve: np.ndarray, level: float) -> int | None:
    smooth = running_mean(curve.tolist(), len(curve) // 20)
    settled = _for_good(abs(smooth - level) <= 0.05 * level)
    if not settled or len(curve) - settled < len(curve) / 4:
        return None
    return settled


def _for_good(holds: np.ndarray) -> int | None:
    """The index from which on it holds to the end."""
    if not holds[-1]:
        return None
    broken = np.flatnonzero(~holds)
    return int(broken[-1]) + 1 if len(broken) else 0


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
