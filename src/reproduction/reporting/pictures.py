"""Every picture of the report: drawn into its folder, or why there is none and what makes it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from reproduction.reporting.columns import spread_text
from reproduction.reporting.curves import Trace, describe, length, read_trace, regimes_of
from reproduction.reporting.figures import ROLLOUT_IS_ONE_STEP, copy_picture
from reproduction.reporting.latency import command as latency_command
from reproduction.reporting.latency import in_ms, printed_latencies
from reproduction.reporting.plots import draw_curriculum, draw_latency, draw_sensitivity
from reproduction.reporting.records import Sources, SweepRecord
from reproduction.reporting.tables import Table
from reproduction.system.errors import UserError

CIFAR, IMAGENET = "table1/cifar100_htm", "table2/imagenet1k_htm"  # whose runs the figures show
REGIMES = (
    "(A): few samples are mixed at first; (B): an abrupt rise, then slow growth; (C): convergence, "
    "as far as the curve shows them"
)


class Missing(Exception):
    """Why a picture cannot be drawn, and what to do about it."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """`name`.png and `name`.pdf of the report; `missing` says why there is none.

    `table` is the name of the table that it belongs to; None for a figure of its own.
    """

    name: str
    title: str
    table: str | None
    caption: str = ""
    alt: str = ""
    missing: str | None = None


Draw = Callable[[Sources, Path], tuple[str, str]]  # to a path; returns caption and alt text


def draw_pictures(sources: Sources, tables: Sequence[Table], folder: Path) -> list[Picture]:
    """Draws all of them into `folder`, and removes what a former report has left of others."""
    return [
        _drawn(sources, folder / f"{name}.png", title, table, draw)
        for name, title, table, draw in _planned(sources, tables)
    ]


def _drawn(sources: Sources, path: Path, title: str, table: str | None, draw: Draw) -> Picture:
    try:
        caption, alt = draw(sources, path)
    except Missing as reason:
        for suffix in (".png", ".pdf"):
            path.with_suffix(suffix).unlink(missing_ok=True)
        return Picture(name=path.stem, title=title, table=table, missing=str(reason))
    return Picture(name=path.stem, title=title, table=table, caption=caption, alt=alt)


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
        figure3, pairs = partial(_saliency, experiment), partial(_pairs, experiment)
        yield (
            f"figure3{suffix}",
            f"Figure 3{at}: saliency by gradient and by attention",
            None,
            figure3,
        )
        yield f"mixed_pairs{suffix}", f"Mixed pairs{at}", None, pairs
    title = f"Figure 4 at {sources.scale} scale, {CIFAR}: what HTM mixes over training"
    yield "figure4", title, None, _curriculum


def _latency(sources: Sources, path: Path) -> tuple[str, str]:
    found, printed = sources.latency, printed_latencies(sources.cells)
    if found is None:
        command = latency_command(sources.scale)
        raise Missing(f"The latency is not measured here; {command} measures it.")
    draw_latency(path, found, printed, sources.mark("table3/attention"))
    ours = found.latencies()
    told = ", ".join(f"{name} {in_ms(x.ms)}" for name, x in ours.items())
    return (
        "Time that each detector takes: medians with quartiles, and the ratio to attention's. The "
        "paper's stand in a panel of their own, for other hardware.",
        f"Bars of the latency here: {told}.",
    )


def _sensitivity(table: Table, sources: Sources, path: Path) -> tuple[str, str]:
    records = [record for record in table.records if isinstance(record, SweepRecord)]
    values = [record for record in records if record.value is not None]
    if not any(record.results for record in values):
        raise Missing(f"No value has a finished run; {sources.command(table.name)} trains them.")
    word = records[0].word
    draw_sensitivity(path, records, word=word, mark=table.mark)
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


def _curriculum(sources: Sources, path: Path) -> tuple[str, str]:
    runs, command = sources.finished(CIFAR), sources.command("reproduce-figure4")
    if not runs:
        raise Missing(f"No run of {CIFAR} is finished; {command} trains them.")
    traces, unread = _traces(runs)
    if not traces:
        raise Missing(" ".join(unread))
    htm, recipe = sources.configs[CIFAR].augmentation.htm, sources.configs[CIFAR].recipe
    assert htm is not None
    draw_curriculum(
        path, traces, batch_size=recipe.batch_size, tau=htm.first.tau, mark=sources.mark(CIFAR)
    )
    lacking = sorted({x.distribution for x in traces if isinstance(x.distribution, str)})
    again = f"without report.md the run writes it again with {command}"
    missing = [f"{' and '.join(lacking)}; {again}."] if lacking else []
    told = describe(regimes_of(traces), length(traces))
    seeds = ", ".join(str(trace.seed) for trace in traces)
    first, last = traces[0].epochs[0], traces[0].epochs[-1]
    return (
        f"Means of every epoch: a thin line for each seed ({seeds}), a thick one for their mean. "
        f"{REGIMES}. Here: {' '.join([f'{told}.', *missing, *unread])}",
        f"Mixed samples, mixed tokens and difficulty over epochs. Seed {traces[0].seed} mixes "
        f"{first.mixed_samples:.1f} samples of a batch in the first epoch and "
        f"{last.mixed_samples:.1f} in the last. {told}.",
    )


def _traces(runs: Mapping[int, Path]) -> tuple[list[Trace], list[str]]:
    """Of the runs whose metrics can be read, and why of the others not."""
    traces, unread = [], []
    for seed, folder in runs.items():
        try:
            traces.append(read_trace(folder, seed))
        except UserError as error:
            unread.append(f"Without {folder.name}: {error}.")
    return traces, unread
