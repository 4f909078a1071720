"""Draws all figures of the report into its folder, or says why one is missing."""

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from pydantic import TypeAdapter

from reproduction.reporting.columns import spread_text
from reproduction.reporting.curriculum import draw_curriculum
from reproduction.reporting.figures import (
    BLUE,
    GREY,
    NO_ROLLOUT,
    ORANGE,
    VERMILION,
    Missing,
    copy_picture,
    figure,
)
from reproduction.reporting.latency import PAPERS, Latency, in_ms, printed_latencies
from reproduction.reporting.latency import command as latency_command
from reproduction.reporting.records import Sources, SweepRecord
from reproduction.reporting.tables import Table
from reproduction.system.errors import first_line

CIFAR, IMAGENET = "table1/cifar100_htm", "table2/imagenet1k_htm"  # whose runs the figures show


class Picture(NamedTuple):
    """`name`.png and `name`.pdf of the report, or in `missing` the reason why they do not exist.

    `table` is the name of the table that the picture belongs to, None for a separate figure.
    """

    name: str
    title: str
    table: str | None
    caption: str
    alt: str
    missing: str | None


Draw = Callable[[Sources, Path], tuple[str, str]]  # to a path; returns caption and alt text


def draw_pictures(sources: Sources, tables: Sequence[Table], folder: Path) -> list[Picture]:
    """Draws all pictures into `folder`; removes old files of those that cannot be drawn."""
    pictures = []
    for name, title, table, draw in _planned(sources, tables):
        caption, alt, missing = "", "", None
        try:
            caption, alt = draw(sources, folder / f"{name}.png")
        except Missing as reason:
            missing = str(reason)
            for suffix in (".png", ".pdf"):
                (folder / f"{name}{suffix}").unlink(missing_ok=True)
        pictures.append(Picture(name, title, table, caption, alt, missing))
    return pictures


def _planned(
    sources: Sources, tables: Sequence[Table]
) -> Iterator[tuple[str, str, str | None, Draw]]:
    """Yields name, title, table and function of each picture."""
    for table in tables:
        if table.name == "table3":
            yield "latency", "Latency of the saliency detectors", table.name, _draw_latency
        if isinstance(table.records[0], SweepRecord):
            yield table.name, table.title, table.name, partial(_draw_sensitivity, table)
    for experiment, suffix in ((CIFAR, ""), (IMAGENET, "_imagenet1k")):
        if suffix and not sources.finished(experiment):
            continue
        at = f" at {sources.scale} scale, {experiment}"
        title = f"Figure 3{at}: saliency by gradient and by attention"
        yield f"figure3{suffix}", title, None, partial(_copy_saliency, experiment)
        yield f"mixed_pairs{suffix}", f"Mixed pairs{at}", None, partial(_copy_pairs, experiment)
    title = f"Figure 4 at {sources.scale} scale, {CIFAR}: mixing by HTM over training"
    yield "figure4", title, None, partial(draw_curriculum, CIFAR)


def _draw_latency(sources: Sources, path: Path) -> tuple[str, str]:
    """Draws our latencies with quartiles, and the printed ones in a separate panel."""
    measurement, printed = sources.latency, printed_latencies(sources.cells)
    if measurement is None:
        command = latency_command(sources.scale)
        raise Missing(f"The latency is not measured here; {command} measures it.")
    ours = measurement.latencies()
    with figure(path, 1, 2, figsize=(5.4, 3.4), mark=sources.mark("table3/attention")) as panels:
        panels[0].set_title(textwrap.fill(measurement.conditions, 32), fontsize=9)
        panels[0].set_ylabel("latency [ms]")
        _draw_bars(panels[0], {name: ours[name] for name in printed if name in ours}, BLUE)
        panels[1].set_title(f"printed in the paper,\non {PAPERS}", fontsize=9)
        _draw_bars(panels[1], printed, "none")
    values = ", ".join(f"{name} {in_ms(x.ms)}" for name, x in ours.items())
    return (
        "Latency of each detector: medians with quartiles, and the ratio to attention. The "
        "paper's values are in a separate panel, as they are of other hardware.",
        f"Bars of the latency here: {values}.",
    )


def _draw_bars(axes: Axes, latencies: Mapping[str, Latency], color: str) -> None:
    """Draws a bar for each detector, labelled with its ratio; `none` leaves the bars hollow."""
    for x, (ms, low, high, ratio) in enumerate(latencies.values()):
        axes.bar(x, ms, color=color, edgecolor=BLUE, linewidth=1.2, width=0.6)
        if low is not None and high is not None and high > low:
            error = [[ms - low], [high - ms]]
            axes.errorbar(x, ms, yerr=error, color="black", capsize=4, linewidth=1)
        label = in_ms(ms) + ("" if ratio is None else f"\nx{ratio:.1f}")
        above: Any = {"xytext": (0, 3), "textcoords": "offset points", "va": "bottom"}
        top = ms if high is None else high
        axes.annotate(label, (x, top), ha="center", fontsize=9, **above)
    axes.set_xticks(range(len(latencies)), list(latencies), fontsize=9)
    axes.margins(x=0.12, y=0.25)


def _draw_sensitivity(table: Table, sources: Sources, path: Path) -> tuple[str, str]:
    """Draws the accuracy over the values of a sweep, evenly spaced, and the baseline as a band."""
    records = [record for record in table.records if isinstance(record, SweepRecord)]
    values = [record for record in records if record.value is not None]
    if not any(record.results for record in values):
        raise Missing(f"No value has a finished run; {sources.command(table.name)} trains them.")
    word = records[0].sweep.word
    with figure(path, figsize=(5.4, 3.8), mark=table.mark) as axes:
        for record in records:
            if record.value is None:
                _draw_baseline(axes, record)
        _draw_line(axes, values)
        for x, record in enumerate(values):
            _annotate(axes, x, record)
        axes.set_xticks(range(len(values)), [str(record.value) for record in values])
        axes.set_xlabel(word)
        axes.set_ylabel("top-1 after the last epoch [%]")
        axes.legend(fontsize=9)
    absent = [record.value or "baseline" for record in records if not record.results]
    accuracies = (
        f"{word} = {record.value}: {spread_text(record.spreads['top1_last'])} %"
        for record in values
        if record.results
    )
    not_run = f" Not run: {', '.join(absent)}." if absent else ""
    return (
        f"Accuracy after the last epoch over {word}: dots with error bars are means and standard "
        f"deviations over seeds, dashes are the seeds, the band is the baseline.{not_run}",
        f"Accuracy over {word}: {'; '.join(accuracies)}.",
    )


def _annotate(axes: Axes, x: int, record: SweepRecord) -> None:
    """Marks a value without runs, and the experiment's own value with its printed accuracy."""
    if not record.results:
        style: Any = {"rotation": 90, "color": "#666666", "fontsize": 9, "ha": "center"}
        foot = axes.get_xaxis_transform()
        axes.text(x, 0.03, "not run", va="bottom", transform=foot, **style)
    if record.is_own:
        label = f"{record.sweep.word} = {record.row}"
        axes.axvline(x, color=GREY, linestyle=":", zorder=0, label=label)
        if record.paper is not None:
            label = f"the paper: {record.paper:.2f}"
            axes.plot([x], [record.paper], "D", color=VERMILION, fillstyle="none", label=label)


def _draw_line(axes: Axes, records: Sequence[SweepRecord]) -> None:
    """Draws means with their deviation, with gaps for values without runs, and each seed."""
    spreads = [record.spreads.get("top1_last") for record in records]
    axes.errorbar(
        range(len(records)),
        [math.nan if spread is None else spread.mean for spread in spreads],
        yerr=[math.nan if spread is None else spread.std or 0.0 for spread in spreads],
        fmt="o-",
        color=BLUE,
        capsize=3,
        linewidth=1.5,
    )
    for x, record in enumerate(records):
        seeds = [result.accuracy["top1_last"] for result in record.results]
        axes.plot([x] * len(seeds), seeds, "_", color=BLUE, markersize=12, alpha=0.5)


def _draw_baseline(axes: Axes, record: SweepRecord) -> None:
    spread = record.spreads.get("top1_last")
    if spread is None:
        return
    axes.axhline(spread.mean, color=ORANGE, label=f"baseline (n = {spread.n})")
    if spread.std is not None:
        axes.axhspan(spread.mean - spread.std, spread.mean + spread.std, color=ORANGE, alpha=0.15)


def _copy_saliency(experiment: str, sources: Sources, path: Path) -> tuple[str, str]:
    run = _copy_from_run(experiment, "saliency", sources, path)
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
    return (
        "Saliency of the tokens that enter the HTM block: gradient of the input, full attention "
        "rollout, and its one-step approximation, which HTM uses; each map is scaled from its "
        f"minimum to its maximum. From {run.name}; {text}.",
        "Rows of images, each beside its saliency maps.",
    )


def _copy_pairs(experiment: str, sources: Sources, path: Path) -> tuple[str, str]:
    run = _copy_from_run(experiment, "mixed_pairs", sources, path)
    return (
        "Receiver, donor and their mixture: patches that come from the donor are orange, and the "
        f"label follows the saliency. From {run.name}.",
        "Rows of three images: receiver, donor, and the receiver with patches of the donor.",
    )


def _copy_from_run(experiment: str, name: str, sources: Sources, path: Path) -> Path:
    """Copies a picture of the finished run with the lowest seed, and returns the run."""
    runs, command = sources.finished(experiment), sources.command("reproduce-figure3")
    if not runs:
        raise Missing(f"No run of {experiment} is finished; {command} trains one.")
    run = runs[min(runs)]
    source = run / f"{name}.png"
    if not source.exists() or not source.with_suffix(".pdf").exists():
        raise Missing(
            f"{run.name} has no {name}.png and .pdf; unless its report.md says why, delete "
            f"report.md and run {command}."
        )
    try:
        copy_picture(source, path, sources.mark(experiment))
    except (OSError, SyntaxError) as error:  # a broken file; Pillow raises SyntaxError for some
        raise Missing(f"{source} cannot be copied: {first_line(error)}.") from error
    return run
