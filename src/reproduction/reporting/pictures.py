"""Every picture of the report: drawn into its folder, or why there is none and what makes it."""

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
    ORANGE,
    ROLLOUT_IS_ONE_STEP,
    VERMILION,
    Missing,
    copy_picture,
    figure,
)
from reproduction.reporting.latency import PAPERS, Latency, in_ms, printed_latencies
from reproduction.reporting.latency import command as latency_command
from reproduction.reporting.records import Sources, SweepRecord
from reproduction.reporting.tables import Table

CIFAR, IMAGENET = "table1/cifar100_htm", "table2/imagenet1k_htm"  # whose runs the figures show


class Picture(NamedTuple):
    """`name`.png and `name`.pdf of the report; `missing` says why there is none.

    `table` is the name of the table that it belongs to; None for a figure of its own.
    """

    name: str
    title: str
    table: str | None
    caption: str
    alt: str
    missing: str | None


Draw = Callable[[Sources, Path], tuple[str, str]]  # to a path; returns caption and alt text


def draw_pictures(sources: Sources, tables: Sequence[Table], folder: Path) -> list[Picture]:
    """Draws all of them into `folder`, and removes what a former report has left of others."""
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
    """Name, title, table."""
    for table in tables:
        if table.name == "table3":
            yield "latency", "Latency of the saliency detectors", table.name, _latency
        if isinstance(table.records[0], SweepRecord):
            yield table.name, table.title, table.name, partial(_sensitivity, table)
    for experiment, suffix in ((CIFAR, ""), (IMAGENET, "_imagenet1k")):
        if suffix and not sources.finished(experiment):
            continue
        at = f" at {sources.scale} scale, {experiment}"
        title = f"Figure 3{at}: saliency by gradient and by attention"
        yield f"figure3{suffix}", title, None, partial(_saliency, experiment)
        yield f"mixed_pairs{suffix}", f"Mixed pairs{at}", None, partial(_pairs, experiment)
    title = f"Figure 4 at {sources.scale} scale, {CIFAR}: what HTM mixes over training"
    yield "figure4", title, None, partial(draw_curriculum, CIFAR)


def _latency(sources: Sources, path: Path) -> tuple[str, str]:
    """Bars of ours with their quartiles, and the paper's in a panel of its own."""
    found, printed = sources.latency, printed_latencies(sources.cells)
    if found is None:
        command = latency_command(sources.scale)
        raise Missing(f"The latency is not measured here; {command} measures it.")
    ours = found.latencies()
    with figure(path, 1, 2, figsize=(5.4, 3.4), mark=sources.mark("table3/attention")) as panels:
        panels[0].set_title(textwrap.fill(found.conditions, 32), fontsize=9)
        panels[0].set_ylabel("latency [ms]")
        _bars(panels[0], {name: ours[name] for name in printed if name in ours}, BLUE)
        panels[1].set_title(f"printed in the paper,\non {PAPERS}", fontsize=9)
        _bars(panels[1], printed, "none")
    told = ", ".join(f"{name} {in_ms(x.ms)}" for name, x in ours.items())
    return (
        "Time that each detector takes: medians with quartiles, and the ratio to attention's. The "
        "paper's stand in a panel of their own, for other hardware.",
        f"Bars of the latency here: {told}.",
    )


def _bars(axes: Axes, latencies: Mapping[str, Latency], color: str) -> None:
    """With the ratio to attention at each; hollow in the colour `none`."""
    for x, found in enumerate(latencies.values()):
        low, high = (found.ms if edge is None else edge for edge in (found.low_ms, found.high_ms))
        axes.bar(x, found.ms, color=color, edgecolor=BLUE, linewidth=1.2, width=0.6)
        if high > low:
            error = [[found.ms - low], [high - found.ms]]
            axes.errorbar(x, found.ms, yerr=error, color="black", capsize=4, linewidth=1)
        ratio = "" if found.ratio is None else f"\nx{found.ratio:.1f}"
        above: Any = {"xytext": (0, 3), "textcoords": "offset points", "va": "bottom"}
        axes.annotate(f"{in_ms(found.ms)}{ratio}", (x, high), ha="center", fontsize=9, **above)
    axes.set_xticks(range(len(latencies)), list(latencies), fontsize=9)
    axes.margins(x=0.12, y=0.25)


def _sensitivity(table: Table, sources: Sources, path: Path) -> tuple[str, str]:
    records = [record for record in table.records if isinstance(record, SweepRecord)]
    values = [record for record in records if record.value is not None]
    if not any(record.results for record in values):
        raise Missing(f"No value has a finished run; {sources.command(table.name)} trains them.")
    word = records[0].sweep.word
    with figure(path, figsize=(5.4, 3.8), mark=table.mark) as axes:
        _draw_sensitivity(axes, records, values)
    absent = [record.value or "baseline" for record in records if not record.results]
    told = (
        f"{word} = {record.value}: {spread_text(record.spreads['top1_last'])} %"
        for record in values
        if record.results
    )
    not_run = f" Not run: {', '.join(absent)}." if absent else ""
    return (
        f"Accuracy after the last epoch over {word}: dots are means over seeds with their standard "
        f"deviation, dashes the seeds, the band is the baseline.{not_run}",
        f"Accuracy over {word}: {'; '.join(told)}.",
    )


def _draw_sensitivity(
    axes: Axes, records: Sequence[SweepRecord], values: Sequence[SweepRecord]
) -> None:
    """Accuracy over the values, in even steps: seeds, mean, deviation; the baseline as a band."""
    for record in records:
        if record.value is None:
            _baseline(axes, record)
    _line(axes, values)
    for x, record in enumerate(values):
        foot = axes.get_xaxis_transform()
        if not record.results:
            style: Any = {"rotation": 90, "color": "#666666", "fontsize": 9, "ha": "center"}
            axes.text(x, 0.03, "not run", va="bottom", transform=foot, **style)
        if record.is_own:
            label = f"{record.sweep.word} = {record.row}"
            axes.axvline(x, color=GREY, linestyle=":", zorder=0, label=label)
        if record.is_own and record.paper is not None:
            label = f"the paper: {record.paper:.2f}"
            axes.plot([x], [record.paper], "D", color=VERMILION, fillstyle="none", label=label)
    axes.set_xticks(range(len(values)), [str(record.value) for record in values])
    axes.set_xlabel(values[0].sweep.word)
    axes.set_ylabel("top-1 after the last epoch [%]")
    axes.legend(fontsize=9)


def _line(axes: Axes, records: Sequence[SweepRecord]) -> None:
    """Means with their deviation, broken where nothing was run, and every seed as a dash."""
    spreads = [record.spreads.get("top1_last") for record in records]
    axes.errorbar(
        range(len(records)),
        [math.nan if found is None else found.mean for found in spreads],
        yerr=[math.nan if found is None else found.std or 0.0 for found in spreads],
        fmt="o-",
        color=BLUE,
        capsize=3,
        linewidth=1.5,
    )
    for x, record in enumerate(records):
        seeds = [result.accuracy["top1_last"] for result in record.results]
        axes.plot([x] * len(seeds), seeds, "_", color=BLUE, markersize=12, alpha=0.5)


def _baseline(axes: Axes, record: SweepRecord) -> None:
    found = record.spreads.get("top1_last")
    if found is None:
        return
    axes.axhline(found.mean, color=ORANGE, label=f"baseline (n = {found.n})")
    if found.std is not None:
        axes.axhspan(found.mean - found.std, found.mean + found.std, color=ORANGE, alpha=0.15)


def _saliency(experiment: str, sources: Sources, path: Path) -> tuple[str, str]:
    run = _borrow(experiment, "saliency", sources, path)
    try:
        entropies = TypeAdapter(dict[str, float]).validate_json((run / "saliency.json").read_text())
    except (OSError, ValueError):
        told = "saliency.json, which holds the entropies, cannot be read"
    else:
        even = entropies.pop("uniform", None)
        told = "mean entropy over a batch, low where it is sharp: "
        told += ", ".join(f"{key.replace('_', ' ')} {x:.2f}" for key, x in entropies.items())
        told += " nats" + ("" if even is None else f"; {even:.2f} if it were even")
        if "full_rollout" not in entropies:
            told += f"; {ROLLOUT_IS_ONE_STEP}"
    return (
        "Saliency of the tokens that enter the HTM block, by the gradient of the input, by full "
        "attention rollout and by its one-step approximation, which HTM uses; each map from its "
        f"least to its greatest value. Of {run.name}; {told}.",
        "Rows of images, each beside its three saliency maps.",
    )


def _pairs(experiment: str, sources: Sources, path: Path) -> tuple[str, str]:
    run = _borrow(experiment, "mixed_pairs", sources, path)
    return (
        "Receiver, donor and their mixture: the patches that stand for the replaced tokens are "
        f"framed, and the label follows the saliency. Of {run.name}.",
        "Rows of three images: receiver, donor, and the receiver with patches of the donor.",
    )


def _borrow(experiment: str, name: str, sources: Sources, path: Path) -> Path:
    """Copies a picture of the finished run of the lowest seed, and returns that run."""
    runs, command = sources.finished(experiment), sources.command("reproduce-figure3")
    if not runs:
        raise Missing(f"No run of {experiment} is finished; {command} trains one.")
    run = runs[min(runs)]
    source = run / f"{name}.png"
    if not source.exists() or not source.with_suffix(".pdf").exists():
        raise Missing(
            f"{run.name} has no {name}.png and .pdf; where its report.md does not say why, remove "
            f"that and repeat {command}."
        )
    copy_picture(source, path, sources.mark(experiment))
    return run
