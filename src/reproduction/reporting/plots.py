"""Sensitivity to a swept key, and the latency of the detectors (Table 3), as pictures."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from reproduction.reporting.figures import BLUE, GREY, ORANGE, VERMILION, figure
from reproduction.reporting.latency import PAPERS, Latency, Measurement, in_ms
from reproduction.reporting.sweeps import SweepRecord

DECADE = 10  # values that span more of it are shown on a logarithmic axis
GAP = 0.12  # of the axis, before what has no place on it


class Scale(NamedTuple):
    """Where each value is drawn; those `apart` have no place on the axis: inf, 0 of a logarithm."""

    places: Mapping[str, float]
    apart: tuple[str, ...]
    is_log: bool


def scale_of(values: Sequence[str]) -> Scale:
    """Even steps between numbers, or between their logarithms where they span a decade."""
    numbers = {value: float(value) for value in values}
    positive = [number for number in numbers.values() if 0 < number < math.inf]
    is_log = bool(positive) and max(positive) >= DECADE * min(positive)
    apart = tuple(v for v, x in numbers.items() if math.isinf(x) or (is_log and x == 0))
    on_axis = {v: math.log10(x) if is_log else x for v, x in numbers.items() if v not in apart}
    low, high = min(on_axis.values(), default=0.0), max(on_axis.values(), default=1.0)
    gap = GAP * (high - low) or 1.0
    beside = {v: high + gap if math.isinf(numbers[v]) else low - gap for v in apart}
    return Scale({value: {**on_axis, **beside}[value] for value in values}, apart, is_log)


def draw_sensitivity(
    path: Path, records: Sequence[SweepRecord], *, word: str, mark: str | None
) -> None:
    """Accuracy over the values: seeds, mean and deviation; the baseline as a band."""
    values = {record.value: record for record in records if record.value is not None}
    scale = scale_of(list(values))
    with figure(path, figsize=(5.4, 3.8), mark=mark) as axes:
        for record in records:
            if record.value is None:
                _baseline(axes, record)
        _line(axes, [(scale.places[v], values[v]) for v in values if v not in scale.apart], "-")
        for value in scale.apart:
            _line(axes, [(scale.places[value], values[value])], "")
            inner = GAP / 2 * (1 if math.isinf(float(value)) else -1)
            width = max(scale.places.values()) - min(scale.places.values())
            axes.axvline(scale.places[value] - inner * width, color=GREY, linewidth=0.6)
        for value, record in values.items():
            if not record.results:
                _not_run(axes, scale.places[value])
            if record.is_own:
                label = f"{word} = {record.row}"
                axes.axvline(scale.places[value], color=GREY, linestyle=":", zorder=0, label=label)
                _printed(axes, scale.places[value], record.paper)
        axes.set_xticks(list(scale.places.values()), list(scale.places))
        axes.set_xlabel(f"{word} (logarithmic)" if scale.is_log else word)
        axes.set_ylabel("top-1 after the last epoch [%]")
        axes.legend(fontsize=9)


def _line(axes: Axes, points: Sequence[tuple[float, SweepRecord]], style: str) -> None:
    """Means with their deviation, broken where nothing was run, and every seed as a dash."""
    spreads = [record.spreads.get("top1_last") for _, record in points]
    axes.errorbar(
        [x for x, _ in points],
        [math.nan if found is None else found.mean for found in spreads],
        yerr=[math.nan if found is None else found.std or 0.0 for found in spreads],
        fmt=f"o{style}",
        color=BLUE,
        capsize=3,
        linewidth=1.5,
    )
    for x, record in points:
        seeds = [result.accuracy["top1_last"] for result in record.results]
        axes.plot([x] * len(seeds), seeds, "_", color=BLUE, markersize=12, alpha=0.5)


def _baseline(axes: Axes, record: SweepRecord) -> None:
    found = record.spreads.get("top1_last")
    if found is None:
        return
    axes.axhline(found.mean, color=ORANGE, label=f"baseline (n = {found.n})")
    if found.std is not None:
        axes.axhspan(found.mean - found.std, found.mean + found.std, color=ORANGE, alpha=0.15)


def _printed(axes: Axes, x: float, paper: float | None) -> None:
    if paper is not None:
        label = f"the paper: {paper:.2f}"
        axes.plot([x], [paper], "D", color=VERMILION, fillstyle="none", label=label)


def _not_run(axes: Axes, x: float) -> None:
    style: Any = {"rotation": 90, "color": "#666666", "fontsize": 9, "ha": "center"}
    axes.text(x, 0.03, "not run", va="bottom", transform=axes.get_xaxis_transform(), **style)


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
