"""Accuracy over one or two settings, with the seeds and the rows that are no point of the sweep."""

from pathlib import Path

import numpy as np
import pandas as pd

from reproduction.reporting.figures import BLUE, ORANGE, VERMILION, figure
from reproduction.studies.table import Table, form, newest, rank, value_text

AXES = {  # a plot is of the validation split if runs have one
    "val_top1_last": "validation top-1 after the last epoch [%]",
    "top1_last": "top-1 after the last epoch [%]",
}


def draw_runs(table: Table, runs: pd.DataFrame, path: Path) -> bool:
    """Draws the accuracy over one or two settings; returns whether there are as many."""
    done = newest(runs)
    name = next((x for x in AXES if done[x].notna().any()), "top1_last")
    seeds = done.pivot(index="seed", columns="key", values=name).astype(float)
    rows = table.numbers[table.numbers.key.isin(seeds.columns[seeds.notna().any()])]
    if rows.empty or not 1 <= len(table.heads) <= 2:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(table.heads) == 1:
        points = dict(zip(rows[table.heads[0]].map(value_text), rows.key, strict=True))
        draw_line(path, points, seeds, table.heads[0], AXES[name])
    else:
        draw_map(
            path, rows.assign(mean=[seeds[key].mean() for key in rows.key]), table.heads, AXES[name]
        )
    return True


def draw_line(
    path: Path,
    points: dict[str, str],
    seeds: pd.DataFrame,
    title: str,
    axis: str,
    bands: dict[str, str] | None = None,
    mark: str | None = None,
) -> None:
    """Draws means with deviations over values, evenly spaced, and each seed as a dash.

    `points` and `bands`, which are drawn across, have the key of each text.
    """
    with figure(path, figsize=(5.4, 3.8), mark=mark) as axes:
        for color, (text, key) in zip((ORANGE, VERMILION), (bands or {}).items(), strict=False):
            own = seeds[key].dropna()
            low, high = (own.mean() + sign * np.nan_to_num(own.std()) for sign in (-1, 1))
            axes.axhline(own.mean(), color=color, label=f"{text} (n = {len(own)})")
            axes.axhspan(low, high, color=color, alpha=0.15)
        means = [seeds[key].mean() for key in points.values()]
        spread = [np.nan_to_num(seeds[key].std()) for key in points.values()]
        style = {"fmt": "o-", "color": BLUE, "capsize": 3, "linewidth": 1.5}
        axes.errorbar(range(len(points)), means, yerr=spread, **style)
        for place, key in enumerate(points.values()):
            own = seeds[key].dropna()
            axes.plot([place] * len(own), own, "_", color=BLUE, markersize=12, alpha=0.5)
        axes.set_xticks(range(len(points)), [*points])
        axes.set_xlabel(title)
        axes.set_ylabel(axis)
        if bands:
            axes.legend(fontsize=9)


def draw_map(path: Path, rows: pd.DataFrame, heads: list[str], label: str) -> None:
    """Draws the means as a heat map with their values."""
    down, across = heads
    means = rows.pivot(index=down, columns=across, values="mean")
    means = means.reindex(index=sorted(means.index, key=rank), columns=sorted(means, key=rank))
    values = means.to_numpy(dtype=float)
    height, width = values.shape
    with figure(path, figsize=(1.8 + 0.9 * width, max(2.4, 1.2 + 0.5 * height))) as axes:
        image = axes.imshow(values, cmap="viridis", aspect="auto")
        middle = float(np.nanmean([np.nanmin(values), np.nanmax(values)]))
        for (i, j), mean in np.ndenumerate(values):
            color = "black" if mean > middle else "white"
            axes.text(j, i, form(mean, ".2f"), ha="center", va="center", color=color)
        axes.set_yticks(range(height), map(value_text, means.index))
        axes.set_xticks(range(width), map(value_text, means.columns))
        axes.set_ylabel(down)
        axes.set_xlabel(across)
        axes.spines[:].set_visible(False)
        axes.figure.colorbar(image, label=label)
