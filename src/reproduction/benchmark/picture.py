"""The picture of benchmark.json: ratios of the training steps, detectors, growth."""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from reproduction.benchmark.records import Report
from reproduction.benchmark.timing import AGAIN
from reproduction.reporting.figures import BLUE, GREEN, GREY, ORANGE, figure

WIDE = 4  # ratios that differ more are drawn on a logarithmic scale


def draw_benchmark(path: Path, report: Report) -> None:
    """One panel for each of what there is; writes a .png and a .pdf."""
    groups = [*chain.from_iterable(report["sections"].values())]
    panels = [
        *(group for group in groups if any("ratio" in row for row in group["rows"].values())),
        *(group for group in groups if "exponents" in group),
    ]
    if not panels:
        return
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with figure(path, rows, columns, figsize=(5 * columns, 2.6 * rows), squeeze=False) as axes:
        for panel, ax in zip(panels, axes.flat, strict=False):
            _growth(ax, panel) if "exponents" in panel else _ratios(ax, panel["rows"])
            ax.set_title(panel["title"], fontsize=10)
        for ax in axes.flat[len(panels) :]:
            ax.set_axis_off()


def _ratios(axes: Axes, rows: Mapping[str, Any]) -> None:
    """Each row's ratio to the first with its quartiles; the grey band is the noise of the first."""
    baseline, *names = rows
    noise = rows[baseline + AGAIN]["ratio"]
    axes.axvspan(noise["low"], noise["high"], color=GREY, alpha=0.3, linewidth=0)
    axes.axvline(1, color="black", linewidth=0.8)
    for place, name in enumerate(names):
        median, low, high = (rows[name]["ratio"][key] for key in ("median", "low", "high"))
        color = GREY if name.endswith(AGAIN) else BLUE
        axes.errorbar(median, place, xerr=[[median - low], [high - median]], fmt="o", color=color)
        axes.annotate(
            f"{median:.3g}",
            (median, place),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    medians = [rows[name]["ratio"]["median"] for name in names]
    if max(medians) / min(medians) > WIDE:
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.7)
    axes.set_xlabel(f"time relative to {baseline!r}")


def _growth(axes: Axes, group: Mapping[str, Any]) -> None:
    """Time and memory over the size that grows."""
    sizes = [[int(size) for size in name.split(" x ")] for name in group["rows"]]
    axis = 0 if sizes[0][0] != sizes[-1][0] else 1
    x = [size[axis] for size in sizes]
    rows = list(group["rows"].values())
    lines = {
        "time": ([row["ms"]["median"] for row in rows], "ms", BLUE),
        "time of the assignment": ([row["assignment_ms"] for row in rows], "ms", ORANGE),
        "memory": ([row["peak_mib"] for row in rows], "MiB", GREEN),
    }
    for name, (y, unit, color) in lines.items():
        label = f"{name} [{unit}], exponent {group['exponents'][name]:.2f}"
        axes.loglog(x, y, ".-", color=color, label=label)
    axes.set_xticks(x, [str(size) for size in x])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("samples" if axis == 0 else "tokens")
    axes.legend(fontsize=8)
