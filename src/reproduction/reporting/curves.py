"""Curves over training: reads metrics.jsonl, up to a million lines, as a stream."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from math import nan
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from reproduction.system.errors import UserError, first_line
from reproduction.system.reading import parse_json

Line = dict[str, Any]


class Epoch(NamedTuple):
    """Means over the batches of an epoch; `mixed_tokens` is None if no sample was mixed."""

    epoch: int
    mixed_samples: float  # per batch
    mixed_tokens: float | None  # per mixed sample
    difficulty: float  # nats; nan from augmentation.off_epoch on


def read_epochs(path: Path) -> list[Epoch]:
    """Reads the epochs of a run with HTM; UserError if `path` is not readable or has no batches."""
    with _reading(path), path.open("rb") as file:
        batches = _in_order(_batches(line for line in file if line.endswith(b"\n")))
        epochs = [epoch_means(lines) for _, lines in groupby(batches, itemgetter("epoch"))]
    if not epochs:
        raise UserError(f"{path.name}: holds no batches")
    return epochs


def running_mean(values: Sequence[float], window: int) -> np.ndarray:
    """Averages a window around each value; the window is cut off at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    start = np.arange(len(values)) - window // 2
    first, end = np.maximum(start, 0), np.minimum(start + window, len(values))
    return (sums[end] - sums[first]) / (end - first)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns the exceptions of a damaged file into a UserError that names it."""
    try:
        yield
    except OSError as error:  # its own text has the full path
        raise UserError(f"{path.name}: not readable: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{path.name}: not readable: {first_line(error)}") from error


def _batches(lines: Iterable[bytes]) -> Iterator[Line]:
    """Yields the lines of batches; leaves out skipped batches and the lines of epochs."""
    rows = (parse_json(line) for line in lines if line.strip())
    return (row for row in rows if "step" in row and not row.get("skipped"))


def _in_order(batches: Iterable[Line]) -> Iterator[Line]:
    """Raises ValueError if steps do not increase, as in two files joined together."""
    last = 0
    for line in batches:
        if line["step"] <= last:
            raise ValueError(f"step {line['step']} comes after step {last}")
        last = line["step"]
        yield line


def epoch_means(lines: Iterable[Line]) -> Epoch:
    """Averages the batches of one epoch."""
    batches = list(lines)
    mixed = sum(line["mixed_samples"] for line in batches)
    tokens = sum(line["mixed_tokens"] * line["mixed_samples"] for line in batches)
    return Epoch(
        batches[0]["epoch"],
        mixed / len(batches),
        tokens / mixed if mixed else None,
        fmean(nan if (nats := line.get("difficulty")) is None else nats for line in batches),
    )
