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
from reproduction.system.storage import write_text
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
        # rank r has evaluated the images r, r + size, ..., see `evaluation_batches`
        places = [np.arange(rank, number, world.size) for rank in range(world.size)]
        order = np.argsort(np.concatenate(places))
        columns = zip(*(part for part in by_rank if part), strict=True)
        targets, best, probabilities = (np.concatenate(parts)[order] for parts in columns)
        names = [source.held_out.name(index) for index in range(number)]
        return Predictions(names, source.classes, targets, best, probabilities)


def write_predictions(path: Path, found: Predictions, labelled: bool = True) -> None:
    """Writes a line for each image: its class, the predicted one, and the best with probability.

    Images that are not `labelled` have no column of their class.
    """
    ranks = range(2, found.best.shape[1] + 1)
    header = ["image", *["class"][:labelled], "predicted", "probability"]
    header += [name for rank in ranks for name in (f"predicted_{rank}", f"probability_{rank}")]
    columns = zip(found.images, found.targets, found.best, found.probabilities, strict=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_csv(
        path,
        header,
        (
            [image, *[found.classes[target]][:labelled], *_flat(found.classes, best, probabilities)]
            for image, target, best, probabilities in columns
        ),
    )


def _flat(classes: list[str], best: np.ndarray, probabilities: np.ndarray) -> Iterable[str]:
    for index, probability in zip(best, probabilities, strict=True):
        yield from (classes[index], f"{probability:.6g}")


def write_tables(result: Path, found: Predictions) -> None:
    """Writes accuracy per class and confusion matrix beside `result`, a JSON file."""
    counts = found.confusion
    is_hit = found.best == found.targets[:, None]  # n k
    top5 = np.bincount(found.targets[is_hit.any(axis=1)], minlength=len(counts))
    rows = zip(found.classes, counts.sum(axis=1), counts.diagonal(), top5, strict=True)
    _write_csv(
        table_path(result, "classes"),
        ["class", "images", "top1", "top5"],
        ([name, n, _percent(hits, n), _percent(among, n)] for name, n, hits, among in rows),
    )
    _write_csv(
        table_path(result, "confusion"),
        ["class", *found.classes],
        ([name, *row] for name, row in zip(found.classes, counts, strict=True)),
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}" if whole else ""


def table_path(result: Path, name: str) -> Path:
    """Returns the path of a table beside `result`, as evaluation-last-classes.csv."""
    return result.with_name(f"{result.stem}-{name}.csv")


def _write_csv(path: Path, header: list[str], rows: Iterable[list[Any]]) -> None:
    """Writes a table; bytes of a file name that are no text are written as escapes."""
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    write_text(path, text.getvalue().encode(errors="backslashreplace").decode())
