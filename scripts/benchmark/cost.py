"""Measures the speed of runs on this machine, and estimates the hours of tables and sweeps.

python -m scripts.benchmark.cost [STUDY ...]. It prints and stores nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from reproduction.config import Config
from reproduction.studies.options import add_settings, settings_of
from reproduction.studies.plan import PlannedRun, plan
from reproduction.studies.study import SWEEPS, TABLES, Settings
from reproduction.system.errors import UserError
from reproduction.system.hardware import hardware_name
from reproduction.system.terminal import Parser, one_line_errors, positive, say
from reproduction.training.distributed import resolve_device
from scripts.benchmark.speed import FLOPS_PER_MAC, Speed, measure_speed, sizes_of, speed_key

SPEEDS = (
    "Medians of several rounds, images/s of the slowest to the fastest round, on synthetic images "
    "on the device; loading and augmentation limit a run if they are slower. HTM mixes every "
    "sample, the most expensive case. Hours: all epochs, each with its evaluation. EFLOP: 3 x 2 x "
    "MACs of the plain model x training images. CPUs are far slower in float16."
)
Speeds = Mapping[str, Speed]  # by speed_key


def run_hours(config: Config, speed: Speed) -> float:
    """Returns the hours of a run; devices are assumed to scale ideally."""
    train, held_out, _ = sizes_of(config)
    epoch = train / speed.training + held_out / speed.evaluation
    return config.recipe.epochs * epoch / config.devices / 3600


def hours_text(hours: float) -> str:
    """Formats with three significant digits, or as whole hours from 100 on."""
    return f"{hours:.3g}" if hours < 100 else f"{hours:,.0f}"


def speed_table(runs: Sequence[PlannedRun], speeds: Speeds) -> str:
    """Returns a row for each run of the first seed."""
    rows = []
    for run in runs:
        if run.config.seed == 0:
            speed, config = speeds[speed_key(run.config)], run.config
            flops = FLOPS_PER_MAC * speed.macs * sizes_of(config).train * config.recipe.epochs
            rows.append(
                {
                    "run": ", ".join(run.labels),
                    "precision": config.recipe.precision,
                    "batch": str(speed.batch_size),
                    "steps/s": f"{speed.training / speed.batch_size:.3g}",
                    "images/s": f"{speed.training:.4g}",
                    "from..to": f"{speed.slowest:.4g}..{speed.fastest:.4g}",
                    "in evaluation": f"{speed.evaluation:.4g}",
                    "EFLOP": f"{flops / 1e18:.3g}",
                    "hours a run": hours_text(run_hours(config, speed)),
                }
            )
    return _text(rows)


def hours_table(studies: Mapping[str, Sequence[PlannedRun]], speeds: Speeds, devices: int) -> str:
    """Returns a row for each study and, if there are several, one for all without duplicates."""
    rows, everything = dict(studies), {run.name: run for runs in studies.values() for run in runs}
    if len(studies) > 1:
        rows["together"] = list(everything.values())
    shown = []
    for study, runs in rows.items():
        hours = sum(run_hours(run.config, speeds[speed_key(run.config)]) for run in runs)
        row = {"study": study, "runs": str(len(runs)), "hours, 1 device": hours_text(hours)}
        more = {f"{devices} devices, ideal scaling": hours_text(hours / devices)}
        shown.append(row | (more if devices > 1 else {}))
    return _text(shown)


def _text(rows: Sequence[Mapping[str, str]]) -> str:
    align = ["left", *["right"] * (len(rows[0]) - 1)]
    return pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True, colalign=align)


def studies_at(settings: Settings) -> list[str]:
    """Returns the tables and sweeps with rows at this scale."""
    only = settings.chosen.only
    return [name for name in (*TABLES, *SWEEPS) if not (name == "table2" and only)]


@one_line_errors("cost.py")
def main() -> None:
    parser = Parser(prog="cost.py", description=__doc__)
    parser.add_argument("studies", nargs="*", help="such as table1 sweep-tau (default: all)")
    add_settings(parser)
    parser.add_argument("--seeds", type=positive, help="seeds per run (default: as reproduce.py)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--batch-size",
        type=positive,
        help="images per step (default: the runs' own; on a CPU, as many as take two seconds)",
    )
    args = parser.parse_args()
    settings = replace(settings_of(args), devices=1)  # hours_table divides by args.devices
    if settings.uses_stand_ins:
        raise UserError(f"scale={args.scale}: runs of seconds on synthetic images are not measured")
    names = args.studies or studies_at(settings)
    studies = {study: plan(study, settings, args.seeds) for study in names}
    distinct = list({run.name: run for runs in studies.values() for run in runs}.values())
    device, speeds = resolve_device(args.device, 1), dict[str, Speed]()
    for run in distinct:
        if (key := speed_key(run.config)) not in speeds:
            say(f"measuring {run.labels[0]}")
            speeds[key] = measure_speed(run.config, device, args.batch_size)
    say(f"\n{hardware_name(device)}\n\n{speed_table(distinct, speeds)}\n\n{SPEEDS}\n")
    say(hours_table(studies, speeds, args.devices))


if __name__ == "__main__":
    main()
