"""The pictures of the report: sweeps, latencies, mixing over training, and copies from runs."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from pydantic import TypeAdapter

from reproduction.reporting.curves import Epoch, read_epochs
from reproduction.reporting.figures import (
    BLUE,
    GREEN,
    GREY,
    NO_ROLLOUT,
    ORANGE,
    VERMILION,
    Missing,
    copy_picture,
    figure,
)
from reproduction.studies import latency
from reproduction.studies.results import Result
from reproduction.studies.runs import newest
from reproduction.studies.study import FULL, Figure, Settings
from reproduction.studies.tables import TESTED, accuracies, spread
from reproduction.system.errors import UserError, first_line

STAND_INS = " Its images are generated stand-ins, as no DATA is set."


class Picture(NamedTuple):
    """`name`.png and `name`.pdf of the report, or in `missing` the reason why they do not exist.

    `table` is the study that the picture is shown with, None for a figure of its own.
    """

    name: str
    title: str
    table: str | None
    caption: str
    alt: str
    missing: str | None


class Sources(NamedTuple):
    """What pictures are drawn from; `keys` has the key of each row by label."""

    settings: Settings
    runs: pd.DataFrame
    keys: Mapping[str, str]

    def finished(self, label: str) -> dict[int, Path]:
        """Returns the folders of the finished runs of a row by seed."""
        runs = newest(self.runs)
        mine = runs[runs.key == self.keys.get(label)]
        return dict(zip(mine.seed, mine.path, strict=True))

    def command(self, target: str) -> str:
        scale = self.settings.scale
        return f"make {target}" + ("" if scale == FULL else f" SCALE={scale}")


Draw = Callable[[Result, Sources, Path], tuple[str, str]]  # to a path; returns caption and alt text


def draw_pictures(results: Sequence[Result], sources: Sources, folder: Path) -> list[Picture]:
    """Draws all pictures into `folder`; removes old files of those that cannot be drawn."""
    pictures = []
    for result, name, title, table, draw in _planned(results, sources):
        caption, alt, missing = "", "", None
        try:
            caption, alt = draw(result, sources, folder / f"{name}.png")
        except Missing as reason:
            missing = str(reason)
            for suffix in (".png", ".pdf"):
                (folder / f"{name}{suffix}").unlink(missing_ok=True)
        pictures.append(Picture(name, title, table, caption, alt, missing))
    return pictures


def _planned(
    results: Sequence[Result], sources: Sources
) -> Iterator[tuple[Result, str, str, str | None, Draw]]:
    """Yields the study, name, title, table and function of each picture."""
    for result in results:
        if result.study.sweep is not None:
            yield result, result.name, result.title, result.name, _draw_sweep
        for name, shown in result.study.figures.items():
            label = f"{result.name}/{shown.of}"
            if shown.shows == "latency":
                yield result, name, shown.title, result.name, _draw_latency
            elif result.name == "table1" or sources.finished(label):
                draw = partial(SHOWS[shown.shows], shown, label)
                yield result, name, f"{shown.title} ({label})", None, draw


def _draw_latency(result: Result, sources: Sources, path: Path) -> tuple[str, str]:
    """Draws our latencies with quartiles, and the printed ones in a separate panel."""
    measured = latency.read_latency(sources.settings.root)
    if measured is None:
        command = latency.command(result.scale)
        raise Missing(f"The latency is not measured here; {command} measures it.")
    rows = result.numbers.dropna(subset=["paper_latency_ms"]).set_index("row")
    with figure(path, 1, 2, figsize=(5.4, 3.4), mark=result.mark) as panels:
        panels[0].set_title(textwrap.fill(measured.conditions, 32), fontsize=9)
        panels[0].set_ylabel("latency [ms]")
        low, high = rows.latency_ms - rows.latency_low_ms, rows.latency_high_ms - rows.latency_ms
        _draw_bars(panels[0], rows.latency_ms, rows.latency_ratio, BLUE)
        panels[0].errorbar(rows.index, rows.latency_ms, [low, high], fmt="none", color="black")
        panels[1].set_title(f"printed in the paper,\non {latency.PAPERS}", fontsize=9)
        _draw_bars(panels[1], rows.paper_latency_ms, rows.paper_latency_ratio, "none")
    values = ", ".join(f"{name} {ms:.1f} ms" for name, ms in rows.latency_ms.items())
    return (
        "Latency of each detector: medians with quartiles, and the ratio to attention. The "
        "paper's values are in a separate panel, as they are of other hardware.",
        f"Bars of the latency here: {values}.",
    )


def _draw_bars(axes: Axes, ms: pd.Series, ratio: pd.Series, color: str) -> None:
    bars = axes.bar(ms.index, ms, color=color, edgecolor=BLUE, linewidth=1.2, width=0.6)
    texts = [f"{x:.3g} ms\nx{y:.1f}" for x, y in zip(ms, ratio, strict=True)]
    axes.bar_label(bars, texts, padding=6, fontsize=9)
    axes.margins(x=0.12, y=0.25)


def _draw_sweep(result: Result, sources: Sources, path: Path) -> tuple[str, str]:
    """Draws the accuracy over the values, evenly spaced, and the baseline as a band."""
    table, sweep = result.numbers, result.study.sweep
    assert sweep is not None
    values = table[table.value.notna()].reset_index(drop=True)
    if not values.n.any():
        raise Missing(f"No value has a finished run; {sources.command(result.name)} trains them.")
    seeds = accuracies(sources.runs)
    with figure(path, figsize=(5.4, 3.8), mark=result.mark) as axes:
        _draw_baseline(axes, table[table.value.isna()].iloc[0])
        mean, std = values[f"{TESTED}_mean"], values[f"{TESTED}_std"].fillna(0)
        style: Any = {"fmt": "o-", "color": BLUE, "capsize": 3, "linewidth": 1.5}
        axes.errorbar(values.index, mean, yerr=std, **style)
        for x, row in values.iterrows():
            _annotate(axes, int(x), row, sweep.word, seeds)
        axes.set_xticks(values.index, values.value)
        axes.set_xlabel(sweep.word)
        axes.set_ylabel("top-1 after the last epoch [%]")
        axes.legend(fontsize=9)
    absent = table.value.fillna("baseline")[table.n == 0]
    done = values[values.n > 0]
    texts = [
        f"{sweep.word} = {row.value}: {spread(row.top1_last_mean, row.top1_last_std)} %"
        for row in done.itertuples()
    ]
    return (
        f"Accuracy after the last epoch over {sweep.word}: dots with error bars are means and "
        "standard deviations over seeds, dashes are the seeds, the band is the baseline."
        + (f" Not run: {', '.join(absent)}." if len(absent) else ""),
        f"Accuracy over {sweep.word}: {'; '.join(texts)}.",
    )


def _annotate(axes: Axes, x: int, row: Any, word: str, seeds: pd.DataFrame) -> None:
    """Draws the seeds of a value or `not run`, and marks the paper's own value."""
    if row.n:
        own = seeds[row.key].dropna()
        axes.plot([x] * len(own), own, "_", color=BLUE, markersize=12, alpha=0.5)
    else:
        style: Any = {"rotation": 90, "color": "#666666", "fontsize": 9, "ha": "center"}
        axes.text(x, 0.03, "not run", va="bottom", transform=axes.get_xaxis_transform(), **style)
    if row.key == row.base:
        axes.axvline(x, color=GREY, linestyle=":", zorder=0, label=f"{word} = {row.row}")
        if not pd.isna(row.paper_top1):
            label = f"the paper: {row.paper_top1:.2f}"
            axes.plot([x], [row.paper_top1], "D", color=VERMILION, fillstyle="none", label=label)


def _draw_baseline(axes: Axes, row: Any) -> None:
    if not row.n:
        return
    mean, std = row[f"{TESTED}_mean"], row[f"{TESTED}_std"]
    axes.axhline(mean, color=ORANGE, label=f"baseline (n = {row.n})")
    if not pd.isna(std):
        axes.axhspan(mean - std, mean + std, color=ORANGE, alpha=0.15)


def _draw_curriculum(
    shown: Figure, label: str, result: Result, sources: Sources, path: Path
) -> tuple[str, str]:
    """Draws mixed samples, tokens and difficulty over epochs: a thin line a seed, and the mean."""
    traces, unread = dict[int, np.ndarray](), list[str]()
    for seed, folder in sources.finished(label).items():
        try:
            traces[seed] = np.array(read_epochs(folder / "metrics.jsonl"), dtype=float)
        except UserError as error:
            unread.append(f" Without {folder.name}: {error}.")
    if not traces:
        command = sources.command("reproduce-figure4")
        raise Missing("".join(unread) or f"No run of {label} is finished; {command} trains them.")
    number = min(map(len, traces.values()))
    with np.errstate(invalid="ignore"):
        mean = np.nanmean([trace[:number] for trace in traces.values()], axis=0)
    with figure(path, 3, 1, figsize=(5.4, 6.4), sharex=True, mark=result.mark) as panels:
        for axes, name, color, title in zip(panels, *PANELS, strict=True):
            column = Epoch._fields.index(name)
            for trace in traces.values() if len(traces) > 1 else ():
                axes.plot(trace[:, 0], trace[:, column], color=color, alpha=0.4, linewidth=0.7)
            marker = "." if number < 20 else ""
            axes.plot(mean[:, 0], mean[:, column], marker=marker, color=color, linewidth=1.8)
            axes.set_ylabel(title)
            axes.set_ylim(0, max(1e-9, axes.get_ylim()[1]))
        panels[-1].set_xlabel("epoch")
        panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    first, last = next(iter(traces.values()))[[0, -1], 1]
    seeds = ", ".join(map(str, traces))
    return (
        f"Epoch means: a thin line for each seed ({seeds}) and a thick one for their mean."
        f"{''.join(unread)}",
        f"Mixed samples, tokens and difficulty over epochs: {first:.1f} samples per batch in the "
        f"first epoch and {last:.1f} in the last.",
    )


PANELS = (
    ("mixed_samples", "mixed_tokens", "difficulty"),
    (BLUE, ORANGE, GREEN),
    ("easy samples\nper batch", "replaced tokens\nper easy sample", "mean difficulty\n[nats]"),
)


def _copy_saliency(
    shown: Figure, label: str, result: Result, sources: Sources, path: Path
) -> tuple[str, str]:
    run = _copy_from_run("saliency", label, result, sources, path)
    try:
        entropies = TypeAdapter(dict[str, float]).validate_json((run / "saliency.json").read_text())
    except (OSError, ValueError):
        text = "saliency.json, which holds the entropies, cannot be read"
    else:
        uniform = entropies.pop("uniform", None)
        text = "mean entropy over a batch, lower is sharper: "
        text += ", ".join(f"{key.replace('_', ' ')} {x:.2f}" for key, x in entropies.items())
        text += " nats" + ("" if uniform is None else f"; uniform {uniform:.2f}")
        if "full_rollout" not in entropies:
            text += f"; {NO_ROLLOUT}"
    stand_ins = STAND_INS if sources.settings.uses_stand_ins else ""
    return (
        "Saliency of the tokens that enter the HTM block: gradient of the input, full attention "
        "rollout, and its one-step approximation, which HTM uses; each map is scaled from its "
        f"minimum to its maximum. From {run.name}; {text}.{stand_ins}",
        "Rows of images, each beside its saliency maps.",
    )


def _copy_pairs(
    shown: Figure, label: str, result: Result, sources: Sources, path: Path
) -> tuple[str, str]:
    run = _copy_from_run("mixed_pairs", label, result, sources, path)
    stand_ins = STAND_INS if sources.settings.uses_stand_ins else ""
    return (
        "Receiver, donor, the saliency of both, which decides, and their mixture: patches from the "
        f"donor are orange; they stand for tokens, which mix inside the network. From {run.name}."
        f"{stand_ins}",
        "Rows of a receiver, a donor, their saliency and their mixture.",
    )


def _copy_from_run(picture: str, label: str, result: Result, sources: Sources, path: Path) -> Path:
    """Copies a picture from the finished run of the lowest seed; returns the run's folder."""
    runs = sources.finished(label)
    if not runs:
        command = sources.command("reproduce-figure3")
        raise Missing(f"No run of {label} is finished; {command} trains one.")
    run = runs[min(runs)]
    source = run / f"{picture}.png"
    if not source.exists() or not source.with_suffix(".pdf").exists():
        raise Missing(f"{run.name} has no {picture}.png and .pdf; its report.md says why.")
    try:
        copy_picture(source, path, result.mark)
    except (OSError, SyntaxError) as error:  # Pillow raises SyntaxError for some
        raise Missing(f"{source}: not readable: {first_line(error)}") from error
    return run


SHOWS: Mapping[str, Any] = {
    "saliency": _copy_saliency,
    "mixed_pairs": _copy_pairs,
    "curriculum": _draw_curriculum,
}
