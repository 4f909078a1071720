"""What scripts/cost.py shows: the speed of each run, and the hours of each study."""

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from reproduction.config.schema import Config
from reproduction.studies.cost import Speeds, hours_text, run_hours, speed_key, training_flops
from reproduction.studies.plan import PlannedRun

SPEEDS = (
    "Medians of several rounds, images/s from the slowest to the fastest one, with images made up "
    "on the device: where loading and augmenting is slower than that, it is what limits a run. HTM "
    "mixes every sample, which no run exceeds. Hours: all epochs, each with its evaluation. EFLOP: "
    "3 x 2 x MACs of the plain model x training images. CPUs are far slower in float16."
)
COLUMNS = (
    *("precision", "batch", "steps/s", "images/s", "from..to", "in evaluation", "EFLOP"),
    "hours a run",
)


def speed_table(runs: Sequence[PlannedRun], speeds: Speeds, hardware: str) -> Table:
    """A row for each run of the first seed."""
    table = Table(title=escape(hardware), caption=SPEEDS, caption_justify="left")
    table.add_column("run")
    for title in COLUMNS:
        table.add_column(title, justify="right")
    for run in runs:
        if run.config.seed == 0:
            table.add_row(escape("\n".join(run.labels)), *_speed_cells(run.config, speeds))
    return table


def _speed_cells(config: Config, speeds: Speeds) -> list[str]:
    speed = speeds[speed_key(config)]
    return [
        config.recipe.precision,
        str(speed.batch_size),
        f"{speed.training / speed.batch_size:.3g}",
        f"{speed.training:.4g}",
        f"{speed.slowest:.4g}..{speed.fastest:.4g}",
        f"{speed.evaluation:.4g}",
        f"{training_flops(config, speed.macs) / 1e18:.3g}",
        hours_text(run_hours(config, speed)),
    ]


def hours_table(studies: Mapping[str, Sequence[PlannedRun]], speeds: Speeds, devices: int) -> Table:
    """A row for each study and one for all: runs that they share count once there."""
    everything = {run.name: run for runs in studies.values() for run in runs}
    rows = {**studies, **({"together": list(everything.values())} if len(studies) > 1 else {})}
    caption = f"{devices} devices: if they shared the work ideally." if devices > 1 else None
    seeds = len({run.config.seed for run in everything.values()})
    title = f"{seeds} seed{'s' if seeds > 1 else ''}"
    table = Table("study", title=title, caption=caption, caption_justify="left")
    titles = ["runs", "hours, 1 device", *([f"{devices} devices"] if devices > 1 else [])]
    for title in titles:
        table.add_column(title, justify="right")
    for study, runs in rows.items():
        hours = sum(run_hours(run.config, speeds[speed_key(run.config)]) for run in runs)
        per = [1, devices] if devices > 1 else [1]
        table.add_row(study, str(len(runs)), *(hours_text(hours / n) for n in per))
    return table
