"""The style of all figures, and the curves of one run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from reproduction.files import replacing

# The colour-blind safe palette of Okabe and Ito
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.edgecolor": "none",  # white behind the text, no frame
    "svg.hashsalt": "",  # the same names in each file
    "text.parse_math": False,  # names of runs, classes and machines may contain $
}

DPI = 150
ACCURACY = (
    "Top-1 and loss on the images that the axis names, and training loss. That is of augmented and "
    "mixed images with soft labels, by a model with dropout: it can lie above the other loss."
)
MIXED_SAMPLES = (
    "The mean difficulty of a batch (line and band: quantiles 5, 50 and 95 % of the batches of an "
    "epoch); easy samples and those of them in which HTM has replaced a token, mixed ones; the "
    "tokens replaced in each mixed sample (dots: batches, lines: running means)."
)


@contextmanager
def figure(path: Path, *grid: int, figsize: tuple[float, float], **settings: Any) -> Iterator[Any]:
    """Yields axes, and saves them as .png or .svg, as `path` ends, the same byte for byte."""
    with style.context(["default", STYLE]):  # whatever the user's matplotlibrc says
        fig = Figure(figsize, layout="constrained")  # by pyplot it would need a backend
        yield fig.subplots(*grid, **settings)
        with replacing(path) as temporary:
            fig.savefig(temporary, format=path.suffix[1:], dpi=DPI, metadata={"Date": None})


def draw_mixed_samples(path: Path, steps: pd.DataFrame, batch_size: int) -> None:
    """Draws difficulty and mixed samples per batch over training, as in the paper's Figure 4."""
    with figure(path, 3, 1, figsize=(6, 6), sharex=True) as (difficulty, samples, tokens):
        epochs = steps.dropna(subset="difficulty").groupby("epoch")  # before off_epoch
        middle = epochs.step.mean()
        low = epochs.difficulty.quantile(0.05)
        high = epochs.difficulty.quantile(0.95)
        difficulty.fill_between(middle, low, high, color=VERMILION, alpha=0.2, linewidth=0)
        median = epochs.difficulty.quantile(0.5)
        difficulty.plot(middle, median, color=VERMILION, marker=".", markersize=3)
        difficulty.set_ylabel("mean difficulty\nof a batch [nats]")
        _from_zero(difficulty)
        _scatter_with_mean(samples, steps.step, steps.easy_samples, BLUE, "easy")
        _scatter_with_mean(samples, steps.step, steps.mixed_samples, GREEN, "mixed")
        samples.set_ylabel(f"samples in a\nbatch of up to {batch_size}")
        samples.legend()
        _from_zero(samples, batch_size)
        _scatter_with_mean(tokens, steps.step, steps.mixed_tokens, ORANGE)
        tokens.set_ylabel("replaced tokens\nper mixed sample")
        _from_zero(tokens)
        tokens.set_xlabel("training batch")
        tokens.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_accuracy(path: Path, steps: pd.DataFrame, epochs: pd.DataFrame) -> None:
    """Draws held-out accuracy, training loss and held-out loss; of the validation split if any."""
    images, key, loss_key = "held-out", "top1", "eval_loss"
    if "val_top1" in epochs:
        images, key, loss_key = "validation", "val_top1", "val_loss"
    batches_per_epoch = (steps.step / steps.epoch).max()  # at the last batch of an epoch
    with figure(path, 2, 1, figsize=(6, 4.5), sharex=True) as (accuracy, loss):
        accuracy.plot(epochs.epoch, epochs[key], color=GREEN, marker=".")
        best = epochs.loc[epochs[key].idxmax()]
        label = f"best: {best[key]:.2f} %, epoch {best.epoch:.0f}"
        circle: Any = {"color": VERMILION, "fillstyle": "none", "markersize": 9}
        accuracy.plot(best.epoch, best[key], "o", label=label, **circle)
        accuracy.legend()
        accuracy.set_ylabel(f"{images} top-1 [%]")
        _scatter_with_mean(loss, steps.step / batches_per_epoch, steps.loss, BLUE, "training")
        loss.plot(epochs.epoch, epochs[loss_key], color=GREEN, marker=".", label=images)
        loss.set_ylabel("loss [nats]")
        _from_zero(loss)
        loss.set_xlabel("epoch")
        loss.xaxis.set_major_locator(MaxNLocator(integer=True))
        loss.legend()


def _from_zero(axes: Axes, top: float | None = None) -> None:
    """Lets an axis begin at zero, with room for a line there and at the top."""
    if top is None:
        _, top = axes.get_ylim()
    axes.set_ylim(-0.03 * top, 1.03 * top)


def _scatter_with_mean(
    axes: Axes, x: pd.Series, y: pd.Series, color: str, label: str | None = None
) -> None:
    """Draws each batch as a faint dot and the running mean as a line."""
    dots: Any = {"alpha": 0.25, "markersize": 3, "markeredgewidth": 0}
    axes.plot(x, y, ".", color=color, rasterized=True, **dots)  # up to a million
    mean = y.rolling(max(1, len(y) // 50), center=True, min_periods=1).mean()
    axes.plot(x, mean, color=color, label=label)
