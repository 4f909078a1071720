"""The style of all figures, the curves of one run, and the confusion matrix of an evaluation."""

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from reproduction.system import replacing

# The colour-blind safe palette of Okabe and Ito
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.edgecolor": "none",  # white behind the text, no frame
    "pdf.fonttype": 42,  # keeps text searchable and editable
    "text.parse_math": False,  # names of runs, classes and machines may contain $
}

MetricsLine = dict[str, Any]  # of metrics.jsonl
MOST_NAMES = 30  # classes of a confusion matrix; more are numbered by the axis
MOST_COUNTS = 15  # classes whose cells hold their counts
LONGEST_CLASS = 16  # characters of a class name
DPI = 150
CAPTIONS = {  # of the pictures of a run
    "accuracy.png": "Top-1 and loss on the {images} images, and training loss.",
    "mixed_samples.png": (
        "The mean difficulty of a batch (line and band: quantiles 5, 50 and 95 % of the batches of "
        "an epoch); easy samples, which HTM mixes, and the tokens that it replaces in each (dots: "
        "batches, lines: running means)."
    ),
    "mixed_pairs.png": (
        "Mixed pairs of the trained model at HTM's first block, on images without augmentation. A "
        "token is taken where the donor is more salient by more than rho; both maps share a scale. "
        "Patches from the donor are outlined; they stand for tokens, which mix inside the network. "
        "The bar is the mixed label."
    ),
    "saliency.png": (
        "Saliency of the tokens that enter HTM's first block, by gradient and by attention (full "
        "rollout, and one step, which HTM uses), on images without augmentation. Each map is "
        "scaled from its minimum to its maximum; entropies are means over a batch, lower is "
        "sharper."
    ),
}


@contextmanager
def figure(
    path: Path,
    *sizes: int,
    figsize: tuple[float, float] | None = None,
    **settings: Any,
) -> Iterator[Any]:
    """Yields axes, and saves them to `path`, a .png, and to a .pdf beside it.

    Files are reproducible byte for byte.
    """
    assert path.suffix == ".png", path
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize, layout="constrained")  # by pyplot it would need a backend
        axes = fig.subplots(*sizes, **settings)
        yield axes
        _save(fig, path)
        _save(fig, path.with_suffix(".pdf"), metadata={"CreationDate": None})


def _save(fig: Figure, path: Path, **settings: Any) -> None:
    with replacing(path) as temporary:
        fig.savefig(temporary, format=path.suffix[1:], dpi=DPI, **settings)


def draw_mixed_samples(path: Path, steps: list[MetricsLine], batch_size: int) -> None:
    """Draws difficulty and mixed samples per batch over training, as in the paper's Figure 4."""
    x = [line["step"] for line in steps]
    with figure(path, 3, 1, figsize=(6, 6), sharex=True) as axes:
        difficulty, samples, tokens = axes
        mixing = [line for line in steps if "difficulty" in line]  # before off_epoch
        _draw_quantiles(difficulty, mixing, "difficulty", VERMILION)
        difficulty.set_ylabel("mean difficulty\nof a batch [nats]")
        _from_zero(difficulty)
        values = [line["mixed_samples"] for line in steps]
        _scatter_with_mean(samples, x, values, BLUE)
        samples.set_ylabel(f"easy samples in a\nbatch of up to {batch_size}")
        _from_zero(samples, batch_size)
        _scatter_with_mean(tokens, x, [line["mixed_tokens"] for line in steps], ORANGE)
        tokens.set_ylabel("replaced tokens\nper easy sample")
        _from_zero(tokens)
        tokens.set_xlabel("training batch")
        tokens.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_accuracy(path: Path, steps: list[MetricsLine], epochs: list[MetricsLine]) -> None:
    """Draws held-out accuracy, training loss and held-out loss; of the validation split if any."""
    images, key, loss_key = "held-out", "top1", "eval_loss"
    if "val_top1" in epochs[0]:
        images, key, loss_key = "validation", "val_top1", "val_loss"
    batches_per_epoch = max(line["step"] / line["epoch"] for line in steps)
    x = [line["step"] / batches_per_epoch for line in steps]
    epoch = [line["epoch"] for line in epochs]
    with figure(path, 2, 1, figsize=(6, 4.5), sharex=True) as (accuracy, loss):
        accuracy.plot(epoch, [line[key] for line in epochs], color=GREEN, marker=".")
        best = max(epochs, key=lambda line: line[key])
        label = f"best: {best[key]:.2f} %, epoch {best['epoch']}"
        circle: Any = {"color": VERMILION, "fillstyle": "none", "markersize": 9}
        accuracy.plot(best["epoch"], best[key], "o", label=label, **circle)
        accuracy.legend()
        accuracy.set_ylabel(f"{images} top-1 [%]")
        _scatter_with_mean(loss, x, [line["loss"] for line in steps], BLUE, "training")
        held_out = [line[loss_key] for line in epochs]
        loss.plot(epoch, held_out, color=GREEN, marker=".", label=images)
        loss.set_ylabel("loss [nats]")
        _from_zero(loss)
        loss.set_xlabel("epoch")
        loss.xaxis.set_major_locator(MaxNLocator(integer=True))
        loss.legend()


def _from_zero(axes: Axes, top: float | None = None) -> None:
    """Lets an axis begin at zero, with room for a line there and at the top."""
    top = axes.get_ylim()[1] if top is None else top
    axes.set_ylim(-0.03 * top, 1.03 * top)


def _draw_quantiles(axes: Axes, lines: list[MetricsLine], key: str, color: str) -> None:
    """Draws the median of each epoch's batches, and a band from quantile 5 to 95 %."""
    epochs = [[*x] for _, x in groupby(lines, key=itemgetter("epoch"))]
    middle = [np.mean([line["step"] for line in epoch]) for epoch in epochs]
    quantiles = [np.quantile([line[key] for line in x], (0.05, 0.5, 0.95)) for x in epochs]
    low, median, high = np.reshape(quantiles, (-1, 3)).T
    axes.fill_between(middle, low, high, color=color, alpha=0.2, linewidth=0)
    axes.plot(middle, median, color=color, marker=".", markersize=3)  # seen for one epoch, too


def _scatter_with_mean(
    axes: Axes,
    x: list[float],
    y: list[float],
    color: str,
    label: str | None = None,
) -> None:
    """Draws each batch as a faint dot and the running mean as a line."""
    dots: Any = {"alpha": 0.25, "markersize": 3, "markeredgewidth": 0}
    axes.plot(x, y, ".", color=color, rasterized=True, **dots)  # up to a million
    axes.plot(x, running_mean(y, max(1, len(y) // 50)), color=color, label=label)


def running_mean(values: Sequence[float], window: int) -> np.ndarray:
    """Averages a window around each value; the window is cut off at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    start = np.arange(len(values)) - window // 2
    first, end = np.maximum(start, 0), np.minimum(start + window, len(values))
    return (sums[end] - sums[first]) / (end - first)


def draw_confusion(result: Path) -> Path:
    """Draws `<result>-confusion.csv` as a .png, which it returns, and a .pdf beside it."""
    table = result.with_name(f"{result.stem}-confusion.csv")
    with table.open(newline="") as file:
        (_, *classes), *rows = csv.reader(file)
    counts = np.array([row[1:] for row in rows], dtype=np.int64)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = 2.5 + 0.3 * min(len(classes), MOST_NAMES)
    picture = table.with_suffix(".png")
    with figure(
        picture, 1, 2, figsize=(side + 2.5, side), sharey=True, width_ratios=(3, 1)
    ) as axes:
        matrix, bars = axes
        matrix.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        matrix.set_xlabel("predicted")
        matrix.set_ylabel("class")
        if len(classes) <= MOST_NAMES:
            names = [shortened(name, LONGEST_CLASS) for name in classes]
            matrix.set_xticks(range(len(names)), names, rotation=90)
            matrix.set_yticks(range(len(names)), names)
        for (row, column), count in np.ndenumerate(counts if len(classes) <= MOST_COUNTS else []):
            color = "white" if shares[row, column] > 0.5 else "black"
            text = str(count) if count else ""
            matrix.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
        edges = np.arange(len(classes) + 1) - 0.5  # a thousand single bars would take seconds
        settings: Any = {"orientation": "horizontal", "fill": True, "color": BLUE}
        bars.stairs(100 * shares.diagonal(), edges, **settings)
        bars.set_xlim(0, 100)
        bars.set_xlabel("top-1 [%]")
    return picture


def shortened(name: str, longest: int) -> str:
    """Returns the name of a class in one line of printable characters."""
    name = " ".join(name.split())
    return name if len(name) <= longest else f"{name[: longest - 3]}..."
