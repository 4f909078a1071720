"""Figure 4: mixing over training with its regimes, and the difficulty of images at the end."""

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
LEAST_EPOCHS = 20  # of a curve that is split into regimes
SAMPLES, TOKENS, NATS = map(Epoch._fields.index, ("mixed_samples", "mixed_tokens", "difficulty"))
REGIMES = (
    "(A): few samples are mixed at first; (B): an abrupt rise, then slow growth; (C): convergence, "
    "as far as the curve shows them"
)


@checked(frozen=True)
class Distribution:
    """A histogram of the difficulty of `images`; `edges` in nats, the last bin is open above."""

    edges: list[NonNegativeFloat]
    counts: list[NonNegativeInt]
    images: PositiveInt

    @model_validator(mode="after")
    def _check(self) -> "Distribution":
        if len(self.edges) != len(self.counts) + 1 or sum(self.counts) != self.images:
            raise ValueError("edges, counts and images do not fit together")
        return self


class Trace(NamedTuple):
    """The curves of one run, and its distribution or the reason why it is missing."""

    seed: int
    epochs: np.ndarray  # e 4: the fields of Epoch, nan for None
    distribution: Distribution | str


def draw_curriculum(experiment: str, sources: Sources, path: Path) -> tuple[str, str]:
    """Draws the finished runs of an `experiment` with HTM; returns caption and alt text.

    Raises Missing if there are none, or if none has readable metrics.
    """
    runs, command = sources.finished(experiment), sources.command("reproduce-figure4")
    if not runs:
        raise Missing(f"No run of {experiment} is finished; {command} trains them.")
    traces, unread = _read_traces(runs)
    if not traces:
        raise Missing(" ".join(unread))
    config = sources.configs[experiment]
    assert config.augmentation.htm is not None
    batch_size, tau = config.recipe.batch_size, config.augmentation.htm.first.tau
    mean = _mean(traces)
    regimes = find_regimes(mean[:, SAMPLES].tolist())
    summary = describe(regimes, len(mean))
    with figure(path, 4, 1, figsize=(5.4, 8.6), mark=sources.mark(experiment)) as panels:
        panels[0].set_title(summary, fontsize=10, loc="left")
        _draw_training(panels[:3], traces, mean, batch_size, tau)
        _draw_regimes(panels[:3], regimes, len(mean))
        _draw_distributions(panels[3], traces, tau)
    reasons = sorted({x.distribution for x in traces if isinstance(x.distribution, str)})
    hint = f"to write it again, delete report.md and run {command}"
    missing = [f"{' and '.join(reasons)}; {hint}."] if reasons else []
    seeds = ", ".join(str(trace.seed) for trace in traces)
    first, last = traces[0].epochs[[0, -1], SAMPLES]
    return (
        f"Epoch means: a thin line for each seed ({seeds}) and a thick one for the mean over "
        f"seeds. {REGIMES}. Here: {' '.join([f'{summary}.', *missing, *unread])}",
        f"Mixed samples, mixed tokens and difficulty over epochs. Seed {traces[0].seed} mixes "
        f"{first:.1f} samples per batch in the first epoch and {last:.1f} in the last. {summary}.",
    )


def _read_traces(runs: Mapping[int, Path]) -> tuple[list[Trace], list[str]]:
    """Returns the traces of the readable runs, and the errors of the others."""
    traces, unread = [], []
    for seed, folder in runs.items():
        try:
            epochs = np.array(read_epochs(RunFolder(folder).metrics_path), dtype=float)
            traces.append(Trace(seed, epochs, _read_distribution(folder)))
        except UserError as error:
            unread.append(f"Without {folder.name}: {error}.")
    return traces, unread


def _read_distribution(folder: Path) -> Distribution | str:
    path = folder / DISTRIBUTION
    if not path.exists():
        return f"{DISTRIBUTION} is missing"
    try:
        return TypeAdapter(Distribution).validate_json(path.read_bytes())
    except (OSError, ValueError):
        return f"{DISTRIBUTION} cannot be read"


def _mean(traces: Sequence[Trace]) -> np.ndarray:
    """Averages the epochs that all seeds have: `e 4`, over the finite values of each entry."""
    number = min(len(trace.epochs) for trace in traces)
    rows = np.array([trace.epochs[:number] for trace in traces])
    known = np.isfinite(rows).sum(axis=0)
    return np.where(known, np.nansum(rows, axis=0) / np.maximum(known, 1), np.nan)


class Regimes(NamedTuple):
    """Indices of the first epochs of (B) and (C); None where the curve does not show them."""

    rise: int | None
    convergence: int | None


def find_regimes(mixed_samples: Sequence[float]) -> Regimes:
    """Splits a curve of mixed samples per epoch into the regimes of Figure 4.

    (A) Few samples are mixed. It ends where the curve has permanently covered a fifth of the way
        from its first value to its final level, the mean of the last tenth. This counts as a rise
        only if the first value is less than half of the final level, and as an abrupt one only if
        the curve has permanently covered two fifths of the way within a twentieth of all epochs.
    (B) Slow growth from there on.
    (C) Begins where the running mean over a twentieth of all epochs stays within 5 % of the final
        level. This counts as convergence only if it holds for at least the last quarter of
        training, and not from the first epoch on.

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
    start, end = (_permanent(curve >= first + share * (level - first)) for share in (0.2, 0.4))
    if start is None or end is None or end - start > len(curve) // 20:
        return None
    return start


def _convergence(curve: np.ndarray, level: float) -> int | None:
    smooth = running_mean(curve.tolist(), len(curve) // 20)
    settled = _permanent(abs(smooth - level) <= 0.05 * level)
    if not settled or len(curve) - settled < len(curve) / 4:
        return None
    return settled


def _permanent(holds: np.ndarray) -> int | None:
    """Returns the index from which on a condition holds to the end."""
    start = 1 + int(max(np.flatnonzero(~holds), default=-1))
    return start if start < len(holds) else None


def describe(regimes: Regimes, epochs: int) -> str:
    """Describes the regimes in words, with epochs counted from 1."""
    if epochs < LEAST_EPOCHS:
        return f"{epochs} epochs are too few to identify regimes"
    rise, convergence = regimes
    parts = ["no abrupt rise" if rise is None else f"abrupt rise after epoch {rise}"]
    parts += ["no convergence" if convergence is None else f"converged by epoch {convergence + 1}"]
    return ", ".join(parts)


def _draw_training(
    panels: Sequence[Axes], traces: Sequence[Trace], mean: np.ndarray, batch_size: int, tau: float
) -> None:
    """Draws mixed samples, mixed tokens and difficulty: a thin line per seed, and the mean."""
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
    samples.set_ylabel(f"easy samples in a\nbatch of up to {batch_size}")
    tokens.set_ylabel("replaced tokens\nper easy sample")
    nats.set_ylabel("mean difficulty\n[nats]")
    _draw_tau(nats, nats.axhline, tau)
    nats.set_ylim(0, 1.05 * max(nats.get_ylim()[1], tau if math.isfinite(tau) else 0))
    nats.set_xlabel("epoch")


def _draw_regimes(panels: Sequence[Axes], regimes: Regimes, epochs: int) -> None:
    """Shades the regimes behind the curves, and names them in the first panel.

    Without a rise, the epochs before (C) belong to no regime.
    """
    rise, convergence = regimes
    end = epochs if convergence is None else convergence
    spans = [("(C)", SKY, end, epochs)]
    if rise is not None:
        spans = [("(A)", GREY, 0, rise), ("(B)", "none", rise, end), *spans]
    spans = [span for span in spans if span[3] > span[2]]
    for axes in panels:
        axes.set_xlim(0.5, epochs + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(labelbottom=axes is panels[-1])
        for _, color, low, high in spans:
            style: Any = {"facecolor": color, "alpha": 0.2, "linewidth": 0, "zorder": 0}
            axes.axvspan(low + 0.5, high + 0.5, **style)
    for name, _, low, high in spans:
        is_narrow = high - low < epochs / 15
        x = 0.5 + (low + epochs / 200 if is_narrow else (low + high) / 2)
        height, place = panels[0].get_xaxis_transform(), "left" if is_narrow else "center"
        panels[0].text(x, 0.97, name, va="top", ha=place, transform=height)


def _draw_tau(axes: Axes, line: Callable[..., Any], tau: float) -> None:
    """Draws tau with `line` of the axes, unless it is infinite, and names it above them."""
    meaning = "every sample is easy"
    if math.isfinite(tau):
        line(tau, color=VERMILION, linestyle="--", linewidth=1.2)
        meaning = "below is easy"
    axes.set_title(f"tau = {tau:g}: {meaning}", fontsize=9, loc="right", color=VERMILION)


def _draw_distributions(axes: Axes, traces: Sequence[Trace], tau: float) -> None:
    known = [t.distribution for t in traces if isinstance(t.distribution, Distribution)]
    gaps = [f"seed {t.seed}: {t.distribution}" for t in traces if isinstance(t.distribution, str)]
    axes.set_xlabel("difficulty at the end [nats], the last bin is open above")
    axes.set_ylabel("share of images [%]")
    axes.text(0.5, 0.9, "\n".join(gaps), transform=axes.transAxes, ha="center", va="top")
    if not known:
        axes.set_xticks([])
        axes.set_yticks([])
        return
    shares = [100 * np.array(one.counts) / one.images for one in known]
    for one, share in zip(known, shares, strict=True):
        axes.stairs(share, one.edges, baseline=None, color=GREEN, alpha=0.7, linewidth=0.8)
    if all(one.edges == known[0].edges for one in known):
        axes.stairs(np.mean(shares, axis=0), known[0].edges, fill=True, color=GREEN, alpha=0.3)
    _draw_tau(axes, axes.axvline, tau)
