"""Measures training speed on this machine and estimates the hours of tables and sweeps."""

import argparse
from dataclasses import replace
from pathlib import Path

from reproduction.studies.cost import FILE, Speed, add_costs, hours_table, speed_key, speed_table
from reproduction.studies.options import add_settings, settings_of
from reproduction.studies.plan import PlannedRun, plan, studies_of
from reproduction.system.errors import UserError
from reproduction.system.hardware import hardware_name
from reproduction.system.terminal import Parser, one_line_errors, positive, print_tables


def measure(runs: list[PlannedRun], args: argparse.Namespace) -> tuple[str, dict[str, Speed]]:
    """Returns hardware and speeds of the runs; writes each speed to cost.json at once."""
    from reproduction.studies.speed import measure_speed
    from reproduction.training.distributed import resolve_device

    device = resolve_device(args.device, 1)
    hardware = hardware_name(device)
    speeds: dict[str, Speed] = {}
    for run in runs:
        key = speed_key(run.config)
        if key not in speeds:
            print(f"measuring {run.labels[0]}", flush=True)
            speeds[key] = measure_speed(run.config, device, args.batch_size)
            add_costs(Path(args.outputs, FILE), hardware, {key: speeds[key]})
    return hardware, speeds


@one_line_errors("cost.py")
def main() -> None:
    parser = Parser(description=__doc__)
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
    chosen = args.studies or studies_of(args.scale)
    studies = {study: plan(study, settings, args.seeds) for study in chosen}
    distinct = list({run.name: run for runs in studies.values() for run in runs}.values())
    hardware, speeds = measure(distinct, args)
    print_tables(
        speed_table(distinct, speeds, hardware), hours_table(studies, speeds, args.devices)
    )


if __name__ == "__main__":
    main()
