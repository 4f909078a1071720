"""What the report's own pictures show: sensitivity to a swept key, latency (Table 3), Figure 4."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
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
from reproduction.reporting.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SKY,
    VERMILION,
    figure,
)
from reproduction.reporting.latency import PAPERS, Latency, Measurement, in_ms
from reproduction.reporting.records import SweepRecord


def draw_sensitivity(
    path: Path, records: Sequence[SweepRecord], *, word: str, mark: str | None
) -> None:
    """Accuracy over the values, in even steps: seeds, mean, deviation; the baseline as a band."""
    values = {record.value: record for record in records if record.value is not None}
    with figure(path, figsize=(5.4, 3.8), mark=mark) as axes:
        for record in records:
            if record.value is None:
                _baseline(axes, record)
        _line(axes, list(values.values()))
        for x, record in enumerate(values.values()):
            foot = axes.get_xaxis_transform()
            if not record.results:
                style: Any = {"rotation": 90, "color": "#666666", "fontsize": 9, "ha": "center"}
                axes.text(x, 0.03, "not run", va="bottom", transform=foot, **style)
            if record.is_own:
                label = f"{word} = {record.row}"
                axes.axvline(x, color=GREY, linestyle=":", zorder=0, label=label)
            if record.is_own and record.paper is not None:
                label = f"the paper: {record.paper:.2f}"
                axes.plot([x], [record.paper], "D", color=VERMILION, fillstyle="none", label=label)
        axes.set_xticks(range(len(values)), list(values))
        axes.set_xlabel(word)
        axes.set_ylabel("top-1 after the last epoch [%]")
        axes.legend(fontsize=9)


def _line(axes: Axes, records: Sequence[SweepRecord]) -> None:
    """Means with their deviation, broken where nothing was run, and every seed as a dash."""
    spreads = [record.spreads.get("top1_last") for record in records]
    axes.errorbar(
        range(len(records)),
        [math.nan if found is None else found.mean for found in spreads],
        yerr=[math.nan if found is None else found.std or 0.0 for found in spreads],
        fmt="o-",
        color=BLUE,
        capsize=3,
        linewidth=1.5,
    )
    for x, record in enumerate(records):
        seeds = [result.accuracy["top1_last"] for result in record.results]
        axes.plot([x] * len(seeds), seeds, "_", color=BLUE, markersize=12, alpha=0.5)


def _baseline(axes: Axes, record: SweepRecord) -> None:
    found = record.spreads.get("top1_last")
    if found is None:
        return
    axes.axhline(found.mean, color=ORANGE, label=f"baseline (n = {found.n})")
    if found.std is not None:
        axes.axhspan(found.mean - found.std, found.mean + found.std, color=ORANGE, alpha=0.15)


def draw_latency(
    path: Path, measurement: Measurement, printed: Mapping[str, Latency], mark: str | None
) -> None:
    """Bars of ours with their quartiles, and the paper's in a panel of its own."""
    with figure(path, 1, 2, figsize=(5.4, 3.4), mark=mark) as (ours, paper):
        ours.set_title(textwrap.fill(measurement.conditions, 32), fontsize=9)
        found = measurement.latencies()
        _bars(ours, {name: found[name] for name in printed if name in found}, BLUE)
        paper.set_title(f"printed in the paper,\non {PAPERS}", fontsize=9)
        _bars(paper, printed, "none")
        ours.set_ylabel("latency [ms]")


def _bars(axes: Axes, latencies: Mapping[str, Latency], color: str) -> None:
    """With the ratio to attention at each; hollow in the colour `none`."""
    for x, found in enumerate(latencies.values()):
        low, high = (found.ms if edge is None else edge for edge in (found.low_ms, found.high_ms))
        axes.bar(x, found.ms, color=color, edgecolor=BLUE, linewidth=1.2, width=0.6)
        if high > low:
            error = [[found.ms - low], [high - found.ms]]
            axes.errorbar(x, found.ms, yerr=error, color="black", capsize=4, linewidth=1)
        ratio = "" if found.ratio is None else f"\nx{found.ratio:.1f}"
        above: Any = {"xytext": (0, 3), "textcoords": "offset points", "va": "bottom"}
        axes.annotate(f"{in_ms(found.ms)}{ratio}", (x, high), ha="center", fontsize=9, **above)
    axes.set_xticks(range(len(latencies)), list(latencies), fontsize=9)
    axes.margins(x=0.12, y=0.25)


def draw_curriculum(
    path: Path, traces: Sequence[Trace], *, batch_size: int, tau: float, mark: str | None
) -> None:
    """Mixed samples, mixed tokens and difficulty over training, and difficulty at its end."""
    regimes, number = regimes_of(traces), length(traces)
    spans = _spans(regimes, number)
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
            for _, color, low, high in spans:
                axes.axvspan(low, high, facecolor=color, alpha=0.2, linewidth=0, zorder=0)
        for name, _, low, high in spans:
            is_narrow = high - low < number / 15
            x = low + number / 200 if is_narrow else (low + high) / 2
            height, place = samples.get_xaxis_transform(), "left" if is_narrow else "center"
            samples.text(x, 0.97, name, va="top", ha=place, transform=height)
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
