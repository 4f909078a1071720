"""Accuracy over one or two settings, and the report's pictures: its sweeps and copies from runs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from reproduction.reporting.figures import (
    BLUE,
    CAPTIONS,
    ORANGE,
    VERMILION,
    copy_picture,
    figure,
)
from reproduction.studies.columns import TESTED, form, value_text
from reproduction.studies.runs import newest
from reproduction.studies.study import FULL, Settings, papers_figures
from reproduction.studies.table import Table, by_seed
from reproduction.system.errors import first_line

CHOSEN_BY = "val_top1_last"
ACCURACY = {TESTED: "top-1", CHOSEN_BY: "validation top-1"}


def draw_runs(table: Table, runs: pd.DataFrame, path: Path) -> bool:
    """Draws the accuracy over one or two settings; returns whether there are as many.

    It is that of the validation split if runs have one, and without the runs that have none.
    """
    has_split = table.numbers[f"{CHOSEN_BY}_mean"].notna().any()
    name = CHOSEN_BY if has_split else TESTED
    done = table.numbers[table.numbers[f"{name}_mean"].notna()]
    if done.empty or not 1 <= len(table.heads) <= 2:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(table.heads) == 1:
        (title,) = table.heads
        draw_line(path, done[title].map(value_text), done, by_seed(runs, name), title, name=name)
    else:
        draw_map(path, done, [*table.heads], name)
    return True


def draw_line(
    path: Path,
    values: pd.Series,
    rows: pd.DataFrame,
    seeds: pd.DataFrame,
    title: str,
    baseline: pd.DataFrame | None = None,
    mark: str | None = None,
    name: str = TESTED,
) -> None:
    """Draws means with deviations over `values`, evenly spaced, and each seed as a dash.

    The row of `baseline` is a band; printed by_seed are diamonds.
    """
    places = range(len(rows))
    with figure(path, figsize=(5.4, 3.8), mark=mark) as axes:
        for row in () if baseline is None else baseline[baseline.n > 0].itertuples():
            mean, std = row.top1_last_mean, 0 if row.n == 1 else row.top1_last_std
            axes.axhline(mean, color=ORANGE, label=f"baseline (n = {row.n})")
            axes.axhspan(mean - std, mean + std, color=ORANGE, alpha=0.15)
        mean, std = rows[f"{name}_mean"], rows[f"{name}_std"].fillna(0)
        axes.errorbar(places, mean, yerr=std, fmt="o-", color=BLUE, capsize=3, linewidth=1.5)
        for place, key in zip(places, rows.key, strict=True):
            own = seeds[key].dropna()
            axes.plot([place] * len(own), own, "_", color=BLUE, markersize=12, alpha=0.5)
        for place, top1 in zip(places, rows.get("paper_top1", ()), strict=False):
            if not pd.isna(top1):
                label = f"the paper: {top1:.2f}"
                axes.plot(place, top1, "D", color=VERMILION, fillstyle="none", label=label)
        axes.set_xticks(places, values)
        axes.set_xlabel(title)
        axes.set_ylabel(f"{ACCURACY[name]} after the last epoch [%]")
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=9)


def draw_map(path: Path, rows: pd.DataFrame, titles: Sequence[str], name: str) -> None:
    """Draws the means as a heat map with their values."""
    down, across = titles
    means = rows.pivot(index=down, columns=across, values=f"{name}_mean")
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
        axes.figure.colorbar(image, label=f"{ACCURACY[name]} [%]")


def rank(value: Any) -> tuple[int, float, str]:
    """Sorts settings: numbers before texts, and missing values first."""
    known = isinstance(value, int | float) and not pd.isna(value)
    return (1, float(value), "") if known else (0 if pd.isna(value) else 2, 0.0, str(value))


class Picture(NamedTuple):
    """`name`.png and `name`.pdf of the report, or in `missing` the reason why they do not exist.

    `table` is the study that the picture is shown with, None for a figure of its own.
    """

    name: str
    title: str
    table: str | None
    caption: str = ""
    missing: str = ""


class Missing(Exception):
    """The reason why a picture does not exist, and the remedy."""


def draw_pictures(
    tables: Sequence[Table],
    keys: Mapping[str, str],
    runs: pd.DataFrame,
    settings: Settings,
    folder: Path,
) -> list[Picture]:
    """Draws the sweeps and copies the figures from runs into `folder`.

    `keys` has the key of each row by label. Removes old files of what cannot be drawn.
    """
    draws = {
        Picture(table.name, table.title, table.name): partial(_draw_sweep, table, runs, settings)
        for table in tables
        if "value" in table.numbers
    }
    finished, marks = newest(runs), {table.name: table.mark for table in tables}
    for name, (study, shown) in papers_figures().items():
        label = f"{study}/{shown.of}"
        own = finished[finished.key == keys.get(label)].path
        if study == "table1" or len(own):
            picture = Picture(name, f"{shown.title} ({label})", None)
            draws[picture] = partial(_copy, shown.shows, own, marks.get(study), settings)
    return [_drawn(picture, draw, folder) for picture, draw in draws.items()]


def _drawn(picture: Picture, draw: Callable[[Path], str], folder: Path) -> Picture:
    path = folder / f"{picture.name}.png"
    try:
        return picture._replace(caption=draw(path))
    except Missing as reason:
        for file in (path, path.with_suffix(".pdf")):
            file.unlink(missing_ok=True)
        return picture._replace(missing=str(reason))


def _draw_sweep(table: Table, runs: pd.DataFrame, settings: Settings, path: Path) -> str:
    """Draws the accuracy over the values beside the baseline; returns a caption."""
    (word,) = table.heads
    is_value, done = table.numbers.value.notna(), table.numbers.n > 0
    values, baseline = table.numbers[is_value & done], table.numbers[~is_value & done]
    if values.empty:
        raise Missing(f"No value has a finished run; {_make(table.name, settings)} trains them.")
    draw_line(path, values.value, values, by_seed(runs), word, baseline, table.mark)
    absent = table.numbers.value.fillna("baseline")[~done]
    return (
        f"Accuracy after the last epoch over {word}: dots with error bars are means and "
        "standard deviations over seeds, dashes are the seeds, the band is the baseline."
        + (f" Not run: {', '.join(absent)}." if len(absent) else "")
    )


def _make(target: str, settings: Settings) -> str:
    return f"make {target}" + ("" if settings.scale == FULL else f" SCALE={settings.scale}")


def _copy(name: str, folders: pd.Series, mark: str | None, settings: Settings, path: Path) -> str:
    """Copies a picture from the first of the folders of finished runs; returns a caption."""
    if folders.empty:
        command = _make("reproduce-figure3", settings)
        raise Missing(f"No run of this row is finished; {command} trains one.")
    run = folders.iloc[0]
    source = run / f"{name}.png"
    if not source.exists() or not source.with_suffix(".pdf").exists():
        raise Missing(f"{run.name} has no {name}.png and .pdf; its report.md says why.")
    try:
        copy_picture(source, path, mark)
    except (OSError, SyntaxError) as error:  # Pillow raises SyntaxError for some
        raise Missing(f"{source}: not readable: {first_line(error)}") from error
    return f"{CAPTIONS[source.name]} From {run.name}."
