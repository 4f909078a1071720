"""Plots of tables: over one or two swept keys, and our means beside the paper's values."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from reproduction.reporting.drawing import BLUE, ORANGE, VERMILION, figure
from reproduction.studies.lines import Line
from reproduction.studies.results import OUTCOMES
from reproduction.studies.runs_table import numeric
from reproduction.studies.table import Section, Table
from reproduction.words import last_part

OURS: Any = {"color": BLUE, "fmt": "o", "capsize": 3, "linewidth": 1.5}


def axis_of(lines: Sequence[Line]) -> str:
    """Labels the axis of what the lines are judged by."""
    outcome = OUTCOMES[lines[0].outcome]
    return f"{outcome.title} after the last epoch [{outcome.unit}]"


def draw_runs(table: Table, path: Path) -> bool:
    """Draws a table of runs over one or two settings; returns whether it has as many."""
    (section,) = table.sections
    if not section.finished:
        return False
    heads = section.finished[0].entry.heads
    if not 1 <= len(heads) <= 2:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(heads) == 1:
        (title,) = heads
        draw_line(path, section.finished, title)
    else:
        draw_map(path, section.finished)
    return True


def draw_sweep(path: Path, section: Section) -> bool:
    """Draws the points of a study's sweep, with its other rows across; returns whether any ran."""
    points = [line for line in section.finished if line.entry.id.swept]
    others = [line for line in section.finished if not line.entry.id.swept]
    if not points:
        return False
    title = ", ".join(last_part(name) for name, _ in points[0].entry.id.swept)
    draw_line(path, points, title, others)
    return True


def draw_line(path: Path, points: Sequence[Line], title: str, across: Sequence[Line] = ()) -> None:
    """Draws means with deviations over values, evenly spaced, and each seed as a dash."""
    with figure(path, figsize=(5.4, 3.8)) as axes:
        for color, line in zip((ORANGE, VERMILION), across, strict=False):
            _draw_across(axes, line, color)
        places = range(len(points))
        means = [line.mean for line in points]
        deviations = [np.nan_to_num(line.std) for line in points]
        axes.errorbar(places, means, yerr=deviations, **OURS)
        axes.plot(places, means, color=BLUE)
        for place, line in enumerate(points):
            values = line.values(line.outcome)
            dashes = [place] * len(values)
            axes.plot(dashes, values, "_", color=BLUE, markersize=12, alpha=0.5)
        axes.set_xticks(places, [value_of(line) for line in points])
        axes.set_xlabel(title)
        axes.set_ylabel(axis_of(points))
        if across:
            axes.legend(fontsize=9)


def _draw_across(axes: Any, line: Line, color: str) -> None:
    """Draws a row that is no point of the sweep as a band, and what is printed of it."""
    name = line.entry.heads["row"]
    deviation = np.nan_to_num(line.std)
    axes.axhline(line.mean, color=color, label=f"{name} (n = {line.n})")
    axes.axhspan(line.mean - deviation, line.mean + deviation, color=color, alpha=0.15)
    printed = line.entry.printed.get(OUTCOMES[line.outcome].measure)
    if printed is not None:
        axes.axhline(printed, color=color, linestyle=":", label=f"printed of {name}")


def value_of(line: Line) -> str:
    return ", ".join(value for _, value in line.entry.id.swept)


def draw_map(path: Path, lines: Sequence[Line]) -> None:
    """Draws the means over two settings as a heat map with their values."""
    down, across = lines[0].entry.heads
    rows = pd.DataFrame([{**line.entry.heads, "mean": line.mean} for line in lines])
    means = rows.pivot(index=down, columns=across, values="mean")
    means = means.sort_index(key=numeric).sort_index(axis=1, key=numeric)
    values = means.to_numpy(dtype=float)
    height, width = values.shape
    with figure(path, figsize=(1.8 + 0.9 * width, max(3.4, 1.2 + 0.5 * height))) as axes:
        image = axes.imshow(values, cmap="viridis", aspect="auto")
        middle = float(np.nanmean([np.nanmin(values), np.nanmax(values)]))
        for (i, j), mean in np.ndenumerate(values):
            color = "black" if mean > middle else "white"
            text = "-" if np.isnan(mean) else f"{mean:.2f}"
            axes.text(j, i, text, ha="center", va="center", color=color)
        axes.set_yticks(range(height), means.index)
        axes.set_xticks(range(width), means.columns)
        axes.set_ylabel(down)
        axes.set_xlabel(across)
        axes.spines[:].set_visible(False)
        axes.figure.colorbar(image, label=axis_of(lines))


def draw_beside(path: Path, section: Section) -> None:
    """Draws our means with their 95 % intervals beside the printed values, row by row."""
    lines = section.finished
    with figure(path, figsize=(5.4, 1.3 + 0.45 * len(lines))) as axes:
        places = range(len(lines))
        means = [line.mean for line in lines]
        halves = [half_interval(line) for line in lines]
        axes.errorbar(means, places, xerr=halves, label="ours, mean and 95 % interval", **OURS)
        measure = OUTCOMES[lines[0].outcome].measure
        printed = [line.entry.printed.get(measure, math.nan) for line in lines]
        if not np.isnan(printed).all():
            axes.plot(printed, places, "D", color=VERMILION, label="the paper's")
        axes.set_yticks(places, [f"{name_of(line)} (n = {line.n})" for line in lines])
        axes.invert_yaxis()
        axes.margins(y=0.5 / len(lines))
        axes.grid(axis="y", alpha=0.3)
        axes.set_xlabel(axis_of(lines))
        axes.figure.legend(loc="outside upper center", ncols=2, fontsize=9)


def name_of(line: Line) -> str:
    return " ".join(line.entry.heads.values())


def half_interval(line: Line) -> float:
    """Returns half of the 95 % interval of a mean; 0 of a single run, which has none."""
    if line.n < 2:
        return 0.0
    from scipy.stats import t  # takes seconds to import

    return float(t.ppf(0.975, line.n - 1)) * line.std / math.sqrt(line.n)
