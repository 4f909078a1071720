"""Plots of tables: over swept keys, and our means beside the paper's values."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from reproduction.reporting.drawing import BLUE, VERMILION, figure
from reproduction.studies.runs import Outcome

BARS: Any = {"capsize": 3, "linewidth": 1.5}


def draw(path: Path, lines: pd.DataFrame, outcome: Outcome, keys: Sequence[str]) -> None:
    """Draws the finished rows of a table: over their values if there are swept keys."""
    label = f"{outcome.title} after the last epoch [{outcome.unit}]"
    if keys:
        with figure(path, figsize=(5.4, 3.8)) as axes:
            draw_sweep(axes, lines, keys)
            axes.set_xlabel(keys[-1].rpartition(".")[2])
            axes.set_ylabel(f"{label}\nmean and 95 % interval")
        return
    with figure(path, figsize=(5.4, 1.3 + 0.45 * len(lines))) as axes:
        rows = [f"{text} (n = {n})" for text, n in zip(lines.text, lines.n, strict=True)]
        bars: Any = {"xerr": margins(lines), "label": "ours, mean and 95 % interval", **BARS}
        axes.errorbar(lines["mean"], rows, fmt="o", color=BLUE, **bars)
        if lines.printed.notna().any():
            axes.plot(lines.printed, rows, "D", color=VERMILION, label="the paper's")
        axes.invert_yaxis()
        axes.margins(y=0.5 / len(lines))
        axes.grid(axis="y", alpha=0.3)
        axes.set_xlabel(label)
        axes.set_title(lines.column.iloc[0])
        axes.figure.legend(loc="outside upper center", ncols=2, fontsize=9)


def draw_sweep(axes: Any, lines: pd.DataFrame, keys: Sequence[str]) -> None:
    """Draws means with 95 % intervals over the last key; a line for each value of the others."""
    *others, key = keys
    swept = lines[lines[key] != "-"]
    order = pd.to_numeric(swept[key], errors="coerce").sort_values().index
    values = list(swept[key][order].unique())  # numbers by size, evenly spaced
    axes.set_xticks(range(len(values)), values)
    for names, line in swept.loc[order].groupby(["row", *others], sort=False):
        parts = [f"{x.rpartition('.')[2]}={y}" for x, y in zip(others, names[1:], strict=True)]
        label = ", ".join(filter(None, [names[0], *parts]))
        places = line[key].map(values.index)
        axes.errorbar(places, line["mean"], yerr=margins(line), fmt="o-", label=label, **BARS)
    for row in lines[lines[key] == "-"].itertuples():
        axes.axhline(row.mean, linestyle="--", color=VERMILION, label=f"{row.text} (n = {row.n})")
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(fontsize=9)


def margins(lines: pd.DataFrame) -> pd.Series:
    """Returns how far the 95 % interval of each mean reaches to each side; 0 of a single run."""
    from scipy.stats import t  # takes seconds to import

    return (t.ppf(0.975, lines.n - 1) * lines["std"] / lines.n**0.5).fillna(0)
