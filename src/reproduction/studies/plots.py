"""Plots of tables: over one or two swept keys, and our means beside the paper's values."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from reproduction.reporting.drawing import BLUE, GREEN, ORANGE, VERMILION, figure
from reproduction.studies.statistics import Line
from reproduction.studies.study import short_names
from reproduction.studies.table import Section, Table, formatted, heads_of, order_of, value_text

COLORS = (ORANGE, VERMILION, GREEN)  # of rows across, in turns
OURS: Any = {"color": BLUE, "fmt": "o", "capsize": 3, "linewidth": 1.5}


def axis_of(lines: Sequence[Line]) -> str:
    """Labels the axis of what the lines are judged by."""
    outcome = lines[0].outcome
    return f"{outcome.title} after the last epoch [{outcome.unit}]"


def draw_runs(table: Table, path: Path) -> bool:
    """Draws a table of runs that differ in one or two settings; returns whether they do."""
    (section,) = table.sections
    lines = section.finished
    if not lines or len(lines[0].row.heads) not in (1, 2):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(lines[0].row.heads) == 1:
        draw_line(path, lines, ", ".join(lines[0].row.heads))
    else:
        draw_map(path, lines)
    return True


def draw_sweep(path: Path, section: Section) -> bool:
    """Draws the values of a study's sweep, with its other rows across; returns whether any ran."""
    swept = [line for line in section.finished if line.row.values]
    others = [line for line in section.finished if not line.row.values]
    if swept:
        draw_line(path, swept, ", ".join(short_names([*swept[0].row.values])), others)
    return bool(swept)


def draw_line(path: Path, lines: Sequence[Line], label: str, across: Sequence[Line] = ()) -> None:
    """Draws means with deviations over values, evenly spaced, and each seed as a dash."""
    with figure(path, figsize=(5.4, 3.8)) as axes:
        for line, color in zip(across, cycle(COLORS), strict=False):  # the legend names them
            _draw_across(axes, line, color)
        places = range(len(lines))
        means = [line.mean for line in lines]
        deviations = np.nan_to_num([line.std for line in lines])
        axes.errorbar(places, means, yerr=deviations, **OURS)
        axes.plot(places, means, color=BLUE)
        for place, line in enumerate(lines):
            dashes = [place] * len(line.judged)
            axes.plot(dashes, line.judged, "_", color=BLUE, markersize=12, alpha=0.5)
        values = [", ".join(map(value_text, line.row.values.values())) for line in lines]
        axes.set_xticks(places, values)
        axes.set_xlabel(label)
        axes.set_ylabel(axis_of(lines))
        if across:
            axes.legend(fontsize=9)


def _draw_across(axes: Any, line: Line, color: str) -> None:
    """Draws a row that has none of the values as a band, and what is printed of it."""
    name = line.row.heads["row"]
    deviation = np.nan_to_num(line.std)
    axes.axhline(line.mean, color=color, label=f"{name} (n = {line.n})")
    axes.axhspan(line.mean - deviation, line.mean + deviation, color=color, alpha=0.15)
    if not np.isnan(line.printed):
        axes.axhline(line.printed, color=color, linestyle=":", label=f"printed of {name}")


def draw_map(path: Path, lines: Sequence[Line]) -> None:
    """Draws the means over two settings as a heat map with their values."""
    down, across = lines[0].row.heads
    rows = pd.DataFrame([{**heads_of(line), "mean": line.mean} for line in lines])
    means = rows.pivot(index=down, columns=across, values="mean")
    means = means.reindex(index=ordered(lines, down), columns=ordered(lines, across))
    values = means.to_numpy(dtype=float)
    height, width = values.shape
    with figure(path, figsize=(1.8 + 0.9 * width, max(3.4, 1.2 + 0.5 * height))) as axes:
        image = axes.imshow(values, cmap="viridis", aspect="auto")
        for (i, j), mean in np.ndenumerate(values):
            is_light = image.norm(mean) > 0.5
            style: Any = {"color": "black" if is_light else "white", "ha": "center", "va": "center"}
            axes.text(j, i, formatted(mean, ".2f"), **style)
        axes.set_yticks(range(height), means.index)
        axes.set_xticks(range(width), means.columns)
        axes.set_ylabel(down)
        axes.set_xlabel(across)
        axes.spines[:].set_visible(False)
        axes.figure.colorbar(image, label=axis_of(lines))


def ordered(lines: Sequence[Line], title: str) -> list[str]:
    """Returns the values of a column as text, each once, in the order of the values."""
    values = sorted((line.row.heads[title] for line in lines), key=order_of)
    return list(dict.fromkeys(map(value_text, values)))


def draw_beside(path: Path, section: Section) -> None:
    """Draws our means with their 95 % intervals beside the printed values, row by row."""
    lines = section.finished
    with figure(path, figsize=(5.4, 1.3 + 0.45 * len(lines))) as axes:
        places = range(len(lines))
        means = [line.mean for line in lines]
        margins = np.nan_to_num([margin(line) for line in lines])
        label = "ours, of one seed"
        if any(line.n > 1 for line in lines):
            label = "ours, mean and 95 % interval"
        axes.errorbar(means, places, xerr=margins, label=label, **OURS)
        printed = [line.printed for line in lines]
        if not np.isnan(printed).all():
            axes.plot(printed, places, "D", color=VERMILION, label="the paper's")
        axes.set_yticks(places, [f"{line.row.heads['row']} (n = {line.n})" for line in lines])
        axes.invert_yaxis()
        axes.margins(y=0.5 / len(lines))
        axes.grid(axis="y", alpha=0.3)
        axes.set_xlabel(axis_of(lines))
        axes.figure.legend(loc="outside upper center", ncols=2, fontsize=9)


def margin(line: Line) -> float:
    """Returns how far the 95 % interval of a mean reaches to each side; nan of a single run."""
    from scipy.stats import t  # takes seconds to import

    return float(t.ppf(0.975, line.n - 1) * line.judged.sem())
