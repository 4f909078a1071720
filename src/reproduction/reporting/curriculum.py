"""Figure 4: what HTM mixes over training, by seeds; the regimes of it; difficulty at the end."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt, TypeAdapter, model_validator
from pydantic.dataclasses import dataclass as checked

from reproduction.reporting.curves import Epoch, read_epochs, running_mean
from reproduction.reporting.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SKY,
    VERMILION,
    Missing,
    figure,
)
from reproduction.reporting.records import Sources
from reproduction.runs.folder import RunFolder
from reproduction.system.errors import UserError

DISTRIBUTION = "difficulty.json"  # in the folder of a finished run with HTM
LEAST_EPOCHS = 20  # of a curve that has regimes
SAMPLES, TOKENS, NATS = map(Epoch._fields.index, ("mixed_samples", "mixed_tokens", "difficulty"))
REGIMES = (
    "(A): few samples are mixed at first; (B): an abrupt rise, then slow growth; (C): convergence, "
    "as far as the curve shows them"
)
Span = tuple[str, str, float, float]  # of a regime: name, colour, first and last place


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


class Trace(NamedTuple):
    """What one run tells; without a distribution, why it tells none."""

    seed: int
    epochs: np.ndarray  # e 4: the fields of Epoch, nan where one has no value
    distribution: Distribution | str


def draw_curriculum(experiment: str, sources: Sources, path: Path) -> tuple[str, str]:
    """Draws the finished runs of an `experiment` with HTM; returns caption and alternative text.

    Raises Missing if there are none, or none whose metrics can be read.
    """
    runs, command = sources.finished(experiment), sources.command("reproduce-figure4")
    if not runs:
        raise Missing(f"No run of {experiment} is finished; {command} trains them.")
    traces, unread = _traces(runs)
    if not traces:
        raise Missing(" ".join(unread))
    config = sources.configs[experiment]
    assert config.augmentation.htm is not None
    batch_size, tau = config.recipe.batch_size, config.augmentation.htm.first.tau
    mean = _mean_of(traces)
    regimes = find_regimes(mean[:, SAMPLES].tolist())
    told = describe(regimes, len(mean))
    with figure(path, 4, 1, figsize=(5.4, 8.6), mark=sources.mark(experiment)) as panels:
        panels[0].set_title(told, fontsize=10, loc="left")
        _draw_training(panels[:3], traces, mean, batch_size, tau)
        _draw_regimes(panels[:3], _spans(regimes, len(mean)), len(mean))
        _draw_distributions(panels[3], traces, tau)
    lacking = sorted({x.distribution for x in traces if isinstance(x.distribution, str)})
    again = f"without report.md the run writes it again with {command}"
    missing = [f"{' and '.join(lacking)}; {again}."] if lacking else []
    seeds = ", ".join(str(trace.seed) for trace in traces)
    first, last = traces[0].epochs[[0, -1], SAMPLES]
    return (
        f"Means of every epoch: a thin line for each seed ({seeds}), a thick one for their mean. "
        f"{REGIMES}. Here: {' '.join([f'{told}.', *missing, *unread])}",
        f"Mixed samples, mixed tokens and difficulty over epochs. Seed {traces[0].seed} mixes "
        f"{first:.1f} samples of a batch in the first epoch and {last:.1f} in the last. {told}.",
    )


def _traces(runs: Mapping[int, Path]) -> tuple[list[Trace], list[str]]:
    """Of the runs whose metrics can be read, and why of the others not."""
    traces, unread = [], []
    for seed, folder in runs.items():
        try:
            epochs = np.array(read_epochs(RunFolder(folder).metrics_path), dtype=float)
            traces.append(Trace(seed, epochs, _distribution(folder)))
        except UserError as error:
            unread.append(f"Without {folder.name}: {error}.")
    return traces, unread


def _distribution(folder: Path) -> Distribution | str:
    path = folder / DISTRIBUTION
    if not path.exists():
        return f"{DISTRIBUTION} is missing"
    try:
        return TypeAdapter(Distribution).validate_json(path.read_bytes())
    except (OSError, ValueError):
        return f"{DISTRIBUTION} cannot be read"


def _mean_of(traces: Sequence[Trace]) -> np.ndarray:
    """Over the seeds that have a value, `e 4` of the epochs that all have; nan where none has."""
    number = min(len(trace.epochs) for trace in traces)
    rows = np.array([trace.epochs[:number] for trace in traces])
    known = np.isfinite(rows).sum(axis=0)
    return np.where(known, np.nansum(rows, axis=0) / np.maximum(known, 1), np.nan)


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
    begun = 1 + int(max(np.flatnonzero(~holds), default=-1))
    return begun if begun < len(holds) else None


def describe(regimes: Regimes, epochs: int) -> str:
    """The regimes in words, epochs counted from 1."""
    if epochs < LEAST_EPOCHS:
        return f"{epochs} epochs are too few to tell regimes"
    rise, convergence = regimes
    parts = ["no abrupt rise" if rise is None else f"abrupt rise after epoch {rise}"]
    parts += ["no convergence" if convergence is None else f"converged by epoch {convergence + 1}"]
    return ", ".join(parts)


def _draw_training(
    panels: Sequence[Axes], traces: Sequence[Trace], mean: np.ndarray, batch_size: int, tau: float
) -> None:
    """Mixed samples, mixed tokens and difficulty: a thin line for each seed, and their mean."""
    marker = "." if len(mean) < LEAST_EPOCHS else ""
    for axes, column, color in zip(
        panels, (SAMPLES, TOKENS, NATS), (BLUE, ORANGE, GREEN), strict=True
    ):
        for trace in traces if len(traces) > 1 else ():
            values = trace.epochs[:, column]
            axes.plot(range(1, len(values) + 1), values, color=color, alpha=0.4, linewidth=0.7)
        x = range(1, len(mean) + 1)
        axes.plot(x, mean[:, column], marker=marker, color=color, linewidth=1.8)
        axes.set_ylim(0, max(1e-9, axes.get_ylim()[1]))
    samples, tokens, nats = panels
    samples.set_ylim(0, batch_size * 1.15)
    samples.set_ylabel(f"mixed samples\nof {batch_size} in a batch")
    tokens.set_ylabel("replaced tokens\nper mixed sample")
    nats.set_ylabel("mean difficulty\n[nats]")
    nats.set_ylim(0, 1.2 * max(nats.get_ylim()[1], tau if math.isfinite(tau) else 0))
    _tau(nats.axhline, tau)
    nats.legend(loc="upper right")
    nats.set_xlabel("epoch")


def _draw_regimes(panels: Sequence[Axes], spans: Sequence[Span], number: int) -> None:
    """Behind the curves of `number` epochs, named in the first panel."""
    for axes in panels:
        axes.set_xlim(0.5, number + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(labelbottom=axes is panels[-1])
        for _, color, low, high in spans:
            axes.axvspan(low, high, facecolor=color, alpha=0.2, linewidth=0, zorder=0)
    for name, _, low, high in spans:
        is_narrow = high - low < number / 15
        x = low + number / 200 if is_narrow else (low + high) / 2
        height, place = panels[0].get_xaxis_transform(), "left" if is_narrow else "center"
        panels[0].text(x, 0.97, name, va="top", ha=place, transform=height)


def _tau(line: Callable[..., Any], tau: float) -> None:
    if math.isfinite(tau):
        text = f"tau = {tau:g}: below is easy"
        line(tau, color=VERMILION, linestyle="--", linewidth=1.2, label=text)
    else:
        line(0, color="none", label="tau = inf: every sample is easy")


def _spans(regimes: Regimes, number: int) -> list[Span]:
    """Of each regime that was found; what comes before (C) without a rise is of none."""
    rise, convergence = regimes
    end = number if convergence is None else convergence
    spans: list[Span] = [("(C)", SKY, end, number)]
    if rise is not None:
        spans = [("(A)", GREY, 0, rise), ("(B)", "none", rise, end), *spans]
    return [(name, color, a + 0.5, b + 0.5) for name, color, a, b in spans if b > a]


def _draw_distributions(axes: Axes, traces: Sequence[Trace], tau: float) -> None:
    """Difficulty of images at the end of training, a line for each seed."""
    found = [t.distribution for t in traces if isinstance(t.distribution, Distribution)]
    said = [f"seed {t.seed}: {t.distribution}" for t in traces if isinstance(t.distribution, str)]
    axes.set_xlabel("difficulty at the end [nats], the last bin takes all above")
    axes.set_ylabel("share of images [%]")
    axes.text(0.5, 0.9, "\n".join(said), transform=axes.transAxes, ha="center", va="top")
    if not found:
        axes.set_xticks([])
        axes.set_yticks([])
        return
    shares = [100 * np.array(one.counts) / one.images for one in found]
    for one, share in zip(found, shares, strict=True):
        axes.stairs(share, one.edges, baseline=None, color=GREEN, alpha=0.7, linewidth=0.8)
    if all(one.edges == found[0].edges for one in found):
        axes.stairs(np.mean(shares, axis=0), found[0].edges, fill=True, color=GREEN, alpha=0.3)
    _tau(axes.axvline, tau)
    axes.legend(loc="upper right")
