"""Plots of tables: over swept keys, and our means beside the paper's values."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from reproduction.reporting.drawing import BLUE, GREEN, ORANGE, VERMILION, figure
from reproduction.studies.statistics import Line
from reproduction.studies.study import short_names
from reproduction.studies.table import Section, order_of, value_text

COLORS = (BLUE, ORANGE, VERMILION, GREEN)  # in turns
BARS: Any = {"fmt": "o", "capsize": 3, "linewidth": 1.5}


def axis_of(lines: Sequence[Line]) -> str:
    """Labels the axis of what the lines are judged by."""
    outcome = lines[0].outcome
    return f"{outcome.title} after the last epoch [{outcome.unit}]"


def draw_sweep(path: Path, section: Section) -> bool:
    """Draws the rows over their values, those without any across; returns whether any has run."""
    swept = [line for line in section.finished if line.row.values]
    if swept:
        draw_values(path, swept, [line for line in section.finished if not line.row.values])
    return bool(swept)


def draw_values(path: Path, lines: Sequence[Line], across: Sequence[Line] = ()) -> None:
    """Draws means with deviations over the values of the last key, and each seed as a dash.

    The values are evenly spaced. Those of a row that share the values of the other keys are
    connected.
    """
    names = {line.row.name for line in lines}
    connected = defaultdict[str, dict[str, Line]](dict)
    keys = dict[str, None]()  # in their order, each once
    values = {}
    for line in lines:
        *others, key = short_names([*line.row.values])
        *outer, value = line.row.values.values()
        titles = [f"{name}={value_text(x)}" for name, x in zip(others, outer, strict=True)]
        if len(names) > 1:
            titles.insert(0, line.row.name)
        keys[key] = None
        connected[", ".join(titles)][value_text(value)] = line
        values[value_text(value)] = value
    colors = cycle(COLORS)
    with figure(path, figsize=(5.4, 3.8)) as axes:
        axes.xaxis.update_units(sorted(values, key=lambda text: order_of(values[text])))
        for title, by_value in connected.items():
            color = next(colors)
            means = [line.mean for line in by_value.values()]
            deviations = np.nan_to_num([line.std for line in by_value.values()])
            axes.errorbar([*by_value], means, yerr=deviations, color=color, label=title, **BARS)
            axes.plot([*by_value], means, color=color)
            for text, line in by_value.items():
                dashes = [text] * len(line.judged)
                axes.plot(dashes, line.judged, "_", color=color, markersize=12, alpha=0.5)
        for line in across:
            _draw_across(axes, line, next(colors))
        axes.set_xlabel(", ".join(keys))
        axes.set_ylabel(axis_of(lines))
        if len(connected) > 1 or across:
            axes.legend(fontsize=9)


def _draw_across(axes: Any, line: Line, color: str) -> None:
    """Draws a row that has none of the values as a band, and what is printed of it."""
    name = line.row.heads["row"]
    deviation = np.nan_to_num(line.std)
    axes.axhline(line.mean, color=color, label=f"{name} (n = {line.n})")
    axes.axhspan(line.mean - deviation, line.mean + deviation, color=color, alpha=0.15)
    if not np.isnan(line.printed):
        axes.axhline(line.printed, color=color, linestyle=":", label=f"printed of {name}")


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
        axes.errorbar(means, places, xerr=margins, label=label, color=BLUE, **BARS)
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
