"""Figure 4 as a picture: what HTM mixes over training, with the regimes that are found."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from reproduction.reporting.curves import (
    LEAST_EPOCHS,
    Distribution,
    Epoch,
    Regimes,
    Trace,
    describe,
    length,
    mean_of,
    regimes_of,
    values_of,
)
from reproduction.reporting.figures import BLUE, GREEN, GREY, ORANGE, SKY, VERMILION, figure


def draw_curriculum(
    path: Path, traces: Sequence[Trace], *, batch_size: int, tau: float, mark: str | None
) -> None:
    """Mixed samples, mixed tokens and difficulty over training, and difficulty at its end."""
    regimes, number = regimes_of(traces), length(traces)
    with figure(path, 4, 1, figsize=(5.4, 8.6), mark=mark) as (samples, tokens, nats, end):
        _curves(samples, traces, lambda epoch: epoch.mixed_samples, BLUE)
        samples.set_ylim(0, batch_size * 1.15)
        samples.set_ylabel(f"mixed samples\nof {batch_size} in a batch")
        samples.set_title(describe(regimes, number), fontsize=10, loc="left")
        _curves(tokens, traces, lambda epoch: epoch.mixed_tokens, ORANGE)
        tokens.set_ylabel("replaced tokens\nper mixed sample")
        _curves(nats, traces, lambda epoch: epoch.difficulty, GREEN)
        nats.set_ylabel("mean difficulty\n[nats]")
        nats.set_ylim(0, 1.2 * max(nats.get_ylim()[1], tau if math.isfinite(tau) else 0))
        _tau(nats.axhline, tau)
        nats.legend(loc="upper right")
        for axes in (samples, tokens, nats):
            axes.set_xlim(0.5, number + 0.5)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.tick_params(labelbottom=axes is nats)
            _shade(axes, regimes, number)
        _name_regimes(samples, regimes, number)
        nats.set_xlabel("epoch")
        _distributions(end, traces, tau)


def _curves(
    axes: Axes, traces: Sequence[Trace], value: Callable[[Epoch], float | None], color: str
) -> None:
    """A thin line for each seed, and their mean."""
    for trace in traces if len(traces) > 1 else ():
        values = values_of(trace, value)
        axes.plot(range(1, len(values) + 1), values, color=color, alpha=0.4, linewidth=0.7)
    mean = mean_of(traces, value)
    marker = "." if len(mean) < LEAST_EPOCHS else ""
    axes.plot(range(1, len(mean) + 1), mean, marker=marker, color=color, linewidth=1.8)
    axes.set_ylim(0, max(1e-9, axes.get_ylim()[1]))


def _tau(line: Callable[..., Any], tau: float) -> None:
    if math.isfinite(tau):
        text = f"tau = {tau:g}: below is easy"
        line(tau, color=VERMILION, linestyle="--", linewidth=1.2, label=text)
    else:
        line(0, color="none", label="tau = inf: every sample is easy")


def _spans(regimes: Regimes, number: int) -> list[tuple[str, str, float, float]]:
    """Name, colour, first and last place of each regime that was found."""
    rise = 0 if regimes.rise is None else regimes.rise
    convergence = number if regimes.convergence is None else regimes.convergence
    spans = [("(A)", GREY, 0, rise), ("(B)", "none", rise, convergence)]
    spans += [("(C)", SKY, convergence, number)]
    if regimes.rise is None:  # what comes before (C) is then neither (A) nor (B)
        spans = spans[2:]
    return [(name, color, a + 0.5, b + 0.5) for name, color, a, b in spans if b > a]


def _shade(axes: Axes, regimes: Regimes, number: int) -> None:
    for _, color, start, end in _spans(regimes, number):
        axes.axvspan(start, end, facecolor=color, alpha=0.2, linewidth=0, zorder=0)


def _name_regimes(axes: Axes, regimes: Regimes, number: int) -> None:
    height = axes.get_xaxis_transform()
    for name, _, start, end in _spans(regimes, number):
        is_narrow = end - start < number / 15
        x = start + number / 200 if is_narrow else (start + end) / 2
        axes.text(x, 0.97, name, va="top", ha="left" if is_narrow else "center", transform=height)


def _distributions(axes: Axes, traces: Sequence[Trace], tau: float) -> None:
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
