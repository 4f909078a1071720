"""What a model predicts for each held-out image, and the tables of it.

Letters: b batch, n images, k the BEST most probable classes, or all if there are fewer.
"""

import csv
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from reproduction.data.sources import Data
from reproduction.system import write_text
from reproduction.training.ranks import World

BEST = 5


class Predictions(NamedTuple):
    """Predictions in the order of the data set: `images` are paths, or positions in it."""

    images: list[str]
    classes: list[str]
    targets: np.ndarray  # n
    best: np.ndarray  # n k, the most probable class first
    probabilities: np.ndarray  # n k

    @property
    def confusion(self) -> np.ndarray:
        """The number of images by class and prediction: `c c`."""
        counts = np.zeros((len(self.classes),) * 2, dtype=np.int64)
        np.add.at(counts, (self.targets, self.best[:, 0]), 1)
        return counts


def best_classes(logits: Tensor) -> Tensor:
    """Returns the classes of the largest logits `b c`, largest first: `b k`."""
    return logits.topk(min(BEST, logits.shape[1])).indices


class Recorder:
    """Keeps the predictions for this rank's images on their device."""

    def __init__(self) -> None:
        self.batches: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Adds a batch: logits `b c` in float32, classes `b`."""
        best = best_classes(logits)
        self.batches.append((targets, best, logits.softmax(dim=1).gather(1, best)))

    def gather(self, world: World, source: Data) -> Predictions:
        """Returns the predictions of all ranks."""
        own = [torch.cat(parts).cpu().numpy() for parts in zip(*self.batches, strict=True)]
        number, by_rank = len(source.held_out), world.gather(own)
        # rank r has evaluated the images r, r + size, ..., see `build_evaluation_loader`
        places = [np.arange(rank, number, world.size) for rank in range(world.size)]
        order = np.argsort(np.concatenate(places))
        columns = zip(*(part for part in by_rank if part), strict=True)
        targets, best, probabilities = (np.concatenate(parts)[order] for parts in columns)
        names = [source.held_out.name(index) for index in range(number)]
        return Predictions(names, source.classes, targets, best, probabilities)


Columns = list[tuple[str, Iterable[Any]]]  # name, values


def write_predictions(path: Path, found: Predictions, labelled: bool = True) -> None:
    """Writes a line for each image: its class, the predicted one, and the best with probability.

    Images that are not `labelled` have no column of their class.
    """
    columns: Columns = [("image", found.images)]
    if labelled:
        columns.append(("class", [found.classes[target] for target in found.targets]))
    for rank, (best, values) in enumerate(zip(found.best.T, found.probabilities.T, strict=True)):
        suffix = f"_{rank + 1}" if rank else ""
        columns.append((f"predicted{suffix}", [found.classes[index] for index in best]))
        columns.append((f"probability{suffix}", [f"{value:.6g}" for value in values]))
    _write_csv(path, columns)


def write_tables(result: Path, found: Predictions) -> None:
    """Writes accuracy per class and confusion matrix beside `result`, a JSON file."""
    counts, names = found.confusion, found.classes
    totals, is_hit = counts.sum(axis=1), (found.best == found.targets[:, None]).any(axis=1)  # n
    columns: Columns = [("class", names), ("images", totals)]
    for name, hits in (
        ("top1", counts.diagonal()),
        ("top5", np.bincount(found.targets[is_hit], minlength=len(names))),
    ):
        pairs = zip(hits, totals, strict=True)
        columns.append((name, [f"{100 * hit / n:.2f}" if n else "" for hit, n in pairs]))
    _write_csv(table_path(result, "classes"), columns)
    _write_csv(
        table_path(result, "confusion"), [("class", names), *zip(names, counts.T, strict=True)]
    )


def table_path(result: Path, name: str) -> Path:
    """Returns the path of a table beside `result`, as evaluation-last-classes.csv."""
    return result.with_name(f"{result.stem}-{name}.csv")


def _write_csv(path: Path, columns: Columns) -> None:
    """Writes a table; bytes of a file name that are no text are written as escapes."""
    names, values = zip(*columns, strict=True)
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows([names, *zip(*values, strict=True)])
    write_text(path, text.getvalue().encode(errors="backslashreplace").decode())
