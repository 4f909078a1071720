"""Draws the confusion matrix of an evaluation, with the accuracy of each class."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from reproduction.reporting.figures import BLUE, figure

MOST_NAMES = 30  # classes; more are numbered by the axis
MOST_COUNTS = 15  # classes whose cells hold their counts
LONGEST = 16  # characters of a name


def draw_confusion(result: Path) -> Path:
    """Draws `<result>-confusion.csv` as a .png, which it returns, and a .pdf beside it."""
    table = result.with_name(f"{result.stem}-confusion.csv")
    with table.open(newline="") as file:
        (_, *classes), *rows = csv.reader(file)
    counts = np.array([row[1:] for row in rows], dtype=np.int64)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = 2.5 + 0.3 * min(len(classes), MOST_NAMES)
    picture = table.with_suffix(".png")
    with figure(picture, 1, 2, figsize=(side + 2.5, side), sharey=True, width_ratios=(3, 1)) as (
        matrix,
        bars,
    ):
        matrix.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        matrix.set_xlabel("predicted")
        matrix.set_ylabel("class")
        _write_names(matrix, classes)
        if len(classes) <= MOST_COUNTS:
            _write_counts(matrix, counts, shares)
        edges = np.arange(len(classes) + 1) - 0.5
        settings: Any = {"orientation": "horizontal", "fill": True, "color": BLUE}
        bars.stairs(
            100 * shares.diagonal(), edges, **settings
        )  # a thousand bars would take seconds
        bars.set_xlim(0, 100)
        bars.set_xlabel("top-1 [%]")
    return picture


def _write_names(axes: Axes, classes: list[str]) -> None:
    if len(classes) > MOST_NAMES:
        return
    names = [x if len(x) <= LONGEST else f"{x[: LONGEST - 3]}..." for x in classes]
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)


def _write_counts(axes: Axes, counts: np.ndarray, shares: np.ndarray) -> None:
    for (row, column), count in np.ndenumerate(counts):
        if count:
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(count), ha="center", va="center", color=color, fontsize=8)
