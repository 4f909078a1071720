"""Curves over training: metrics.jsonl as a stream, since a run has up to a million batches."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice, takewhile
from math import nan
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from reproduction.system.errors import UserError, first_line
from reproduction.system.reading import parse_json

BLOCK = 2**16  # bytes that are read at a time from the end

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
