"""The cost of runs: speeds measured by scripts/cost.py, the resulting hours, and their tables.

cost.json maps hardware -> configuration key -> Speed. Does not import torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter
from rich.markup import escape
from rich.table import Table

from reproduction.config import Config
from reproduction.data.folders import Sizes, data_sizes
from reproduction.runs.folder import run_hash
from reproduction.studies.plan import PlannedRun
from reproduction.system.errors import UserError
from reproduction.system.storage import write_text

FILE = "cost.json"
FLOPS_PER_MAC = 6  # of training: 2 in the forward pass, twice that in the backward pass


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Images per second in training (median, slowest and fastest round) and in evaluation.

    `batch_size` and `macs` (of one image) are those of the measurement.
    """

    batch_size: int
    training: float
    slowest: float
    fastest: float
    evaluation: float
    macs: int


Speeds = Mapping[str, Speed]  # by speed_key
COSTS = TypeAdapter(dict[str, dict[str, Speed]])  # the file


def as_measured(config: Config) -> Config:
    """Returns the configuration to measure: one device, and HTM mixes all samples (tau=inf, rho=0).

    Runs of the same speed have the same one.
    """
    stack = config.augmentation
    if stack.htm is not None:
        stack = replace(stack, htm=replace(stack.htm, tau=math.inf, rho=0.0))
    return replace(
        config,
        seed=0,
        devices=1,
        augmentation=stack,
        dataset=replace(config.dataset, root=None, limit=None),
        recipe=replace(config.recipe, epochs=2, warmup_epochs=0, cooldown_epochs=0),
    )


def speed_key(config: Config) -> str:
    """Returns a key that all configurations of the same speed share."""
    return run_hash(as_measured(config))


def sizes_of(config: Config) -> Sizes:
    """Returns the images of an epoch, the held-out images and the classes; see `data_sizes`."""
    sizes = data_sizes(config.dataset.name, config.dataset.root)
    train, held_out = config.dataset.limit, config.dataset.eval_limit
    return sizes._replace(
        train=min(train or sizes.train, sizes.train),
        held_out=min(held_out or sizes.held_out, sizes.held_out),
    )


def run_hours(config: Config, speed: Speed) -> float:
    """Returns the hours of a run; devices are assumed to scale ideally."""
    train, held_out, _ = sizes_of(config)
    epoch = train / speed.training + held_out / speed.evaluation
    return config.recipe.epochs * epoch / config.devices / 3600


def hours_text(hours: float) -> str:
    """Formats with three significant digits, or as whole hours from 100 on."""
    return f"{hours:.3g}" if hours < 100 else f"{hours:,.0f}"


def training_flops(config: Config, macs: int) -> int:
    """Returns 3 x 2 x `macs` of an image x images of all epochs."""
    return FLOPS_PER_MAC * macs * sizes_of(config).train * config.recipe.epochs


def read_costs(path: Path) -> dict[str, dict[str, Speed]]:
    """Returns the speeds by hardware, none without a file; UserError if the file is damaged."""
    if not path.exists():
        return {}
    try:
        return COSTS.validate_json(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: no costs, remove it and measure again: {error}") from error


def add_costs(path: Path, hardware: str, speeds: Speeds) -> None:
    known = read_costs(path)
    known[hardware] = {**known.get(hardware, {}), **speeds}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, COSTS.dump_json(known, indent=2).decode() + "\n")


SPEEDS = (
    "Medians of several rounds, images/s of the slowest to the fastest round, on synthetic images "
    "on the device; loading and augmentation limit a run if they are slower. HTM mixes every "
    "sample, the most expensive case. Hours: all epochs, each with its evaluation. EFLOP: 3 x 2 x "
    "MACs of the plain model x training images. CPUs are far slower in float16."
)
COLUMNS = (
    *("precision", "batch", "steps/s", "images/s", "from..to", "in evaluation", "EFLOP"),
    "hours a run",
)


def speed_table(runs: Sequence[PlannedRun], speeds: Speeds, hardware: str) -> Table:
    """Returns a row for each run of the first seed."""
    table = Table(title=escape(hardware), caption=SPEEDS, caption_justify="left")
    table.add_column("run")
    for title in COLUMNS:
        table.add_column(title, justify="right")
    for run in runs:
        if run.config.seed == 0:
            speed = speeds[speed_key(run.config)]
            table.add_row(
                escape("\n".join(run.labels)),
                run.config.recipe.precision,
                str(speed.batch_size),
                f"{speed.training / speed.batch_size:.3g}",
                f"{speed.training:.4g}",
                f"{speed.slowest:.4g}..{speed.fastest:.4g}",
                f"{speed.evaluation:.4g}",
                f"{training_flops(run.config, speed.macs) / 1e18:.3g}",
                hours_text(run_hours(run.config, speed)),
            )
    return table


def hours_table(studies: Mapping[str, Sequence[PlannedRun]], speeds: Speeds, devices: int) -> Table:
    """Returns a row for each study and, if there are several, one for all without duplicates."""
    rows, everything = dict(studies), {run.name: run for runs in studies.values() for run in runs}
    if len(studies) > 1:
        rows["together"] = list(everything.values())
    seeds = len({run.config.seed for run in everything.values()})
    table = Table("study", title=f"{seeds} seed{'s' if seeds > 1 else ''}", caption_justify="left")
    table.add_column("runs", justify="right")
    table.add_column("hours, 1 device", justify="right")
    if devices > 1:
        table.add_column(f"{devices} devices", justify="right")
        table.caption = f"{devices} devices: assuming ideal scaling."
    for study, runs in rows.items():
        hours = sum(run_hours(run.config, speeds[speed_key(run.config)]) for run in runs)
        cells = [str(len(runs)), hours_text(hours), hours_text(hours / devices)]
        table.add_row(study, *cells[: len(table.columns) - 1])
    return table
