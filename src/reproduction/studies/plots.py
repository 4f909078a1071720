"""Accuracy over one or two settings, with the seeds and the rows that are no point of the sweep."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from reproduction.reporting.figures import BLUE, ORANGE, VERMILION, figure
from reproduction.studies.table import Table, newest, numeric, read_runs, runs_table

AXES = {  # a plot is of the validation split if runs have one
    "val_top1_last": "validation top-1 after the last epoch [%]",
    "top1_last": "top-1 after the last epoch [%]",
}


def draw_runs(table: Table, runs: pd.DataFrame, path: Path) -> bool:
    """Draws the accuracy over one or two settings; returns whether there are as many."""
    done = newest(runs)
    name = next((x for x in AXES if done[x].notna().any()), "top1_last")
    seeds = done.pivot(index="seed", columns="key", values=name)
    rows = table.numbers[table.numbers.key.isin(seeds.columns[seeds.notna().any()])]
    if rows.empty or not 1 <= len(table.heads) <= 2:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(table.heads) == 1:
        ((head, title),) = table.heads.items()
        draw_line(path, seeds[rows.key].set_axis(rows[head], axis=1), title, AXES[name])
    else:
        draw_map(path, rows.assign(mean=rows.key.map(seeds.mean())), table.heads, AXES[name])
    return True


def draw_line(
    path: Path, points: pd.DataFrame, title: str, axis: str, bands: pd.DataFrame | None = None
) -> None:
    """Draws means with deviations over values, evenly spaced, and each seed as a dash.

    `points` and `bands`, which are drawn across, have a row for each seed, and texts as columns.
    """
    with figure(path, figsize=(5.4, 3.8)) as axes:
        for color, (text, own) in zip(
            (ORANGE, VERMILION), () if bands is None else bands.items(), strict=False
        ):
            mean, deviation = own.mean(), np.nan_to_num(own.std())
            axes.axhline(mean, color=color, label=f"{text} (n = {own.count()})")
            axes.axhspan(mean - deviation, mean + deviation, color=color, alpha=0.15)
        places = range(points.shape[1])
        style = {"fmt": "o-", "color": BLUE, "capsize": 3, "linewidth": 1.5}
        axes.errorbar(places, points.mean(), yerr=points.std().fillna(0), **style)
        axes.plot(places, points.T, "_", color=BLUE, markersize=12, alpha=0.5)
        axes.set_xticks(places, points.columns)
        axes.set_xlabel(title)
        axes.set_ylabel(axis)
        if bands is not None:
            axes.legend(fontsize=9)


def draw_map(path: Path, rows: pd.DataFrame, heads: dict[str, str], label: str) -> None:
    """Draws the means as a heat map with their values."""
    down, across = heads
    means = rows.pivot(index=down, columns=across, values="mean")
    means = means.sort_index(key=numeric).sort_index(axis=1, key=numeric)
    values = means.to_numpy(dtype=float)
    height, width = values.shape
    with figure(path, figsize=(1.8 + 0.9 * width, max(3.4, 1.2 + 0.5 * height))) as axes:
        image = axes.imshow(values, cmap="viridis", aspect="auto")
        middle = float(np.nanmean([np.nanmin(values), np.nanmax(values)]))
        for (i, j), mean in np.ndenumerate(values):
            color = "black" if mean > middle else "white"
            axes.text(
                j,
                i,
                "-" if np.isnan(mean) else f"{mean:.2f}",
                ha="center",
                va="center",
                color=color,
            )
        axes.set_yticks(range(height), means.index)
        axes.set_xticks(range(width), means.columns)
        axes.set_ylabel(heads[down])
        axes.set_xlabel(heads[across])
        axes.spines[:].set_visible(False)
        axes.figure.colorbar(image, label=label)


def write_sweep(folders: Sequence[Path], outputs: Path) -> tuple[str, list[Path]]:
    """Writes the numbers and the plot of a sweep to the folder of reports; returns it as text."""
    runs = read_runs(*folders)
    table = runs_table(runs)
    files = table.write(outputs)
    if draw_runs(table, runs, picture := files[0].with_suffix(".png")):
        files.append(picture)
    return "\n".join(table.lines()), files
