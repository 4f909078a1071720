"""Trains the runs of a table, figure, sweep or all, each run once. See also `make help`."""

import argparse
import sys
from pathlib import Path

from reproduction.studies.options import (
    check_launcher,
    resources_of,
    runs_of,
    settings_of,
    study_parser,
)
from reproduction.studies.plan import STUDIES, PlannedRun, Settings
from reproduction.studies.slurm import print_script, submit
from reproduction.studies.states import state_table
from reproduction.system.terminal import Parser, one_line_errors, positive, print_tables


def parser() -> Parser:
    options = study_parser(__doc__)
    options.add_argument(
        "--launcher",
        choices=("local", "joblib", "slurm"),
        default="local",
        help="one run after another, --jobs at a time, or as a job array",
    )
    options.add_argument("--jobs", type=positive, help="for joblib: runs at a time")
    mode = options.add_mutually_exclusive_group()
    mode.add_argument("--dry-run", action="store_true", help="show runs and folders, train nothing")
    mode.add_argument("--status", action="store_true", help="show the progress of the runs")
    mode.add_argument("--script", action="store_true", help="for slurm: print it, submit nothing")
    return options


def reproduce(args: argparse.Namespace) -> int:
    """Shows, submits or trains the runs; returns 1 if a run failed twice."""
    check_launcher(args)
    settings, runs = settings_of(args), runs_of(args)
    if args.dry_run or args.status:
        print_tables(state_table(runs, settings, with_folders=args.dry_run))
        return 0
    if args.script:
        print_script(Path(args.study).stem, runs, settings, resources_of(args))
        return 0
    if args.launcher == "slurm":
        print(submit(Path(args.study).stem, runs, settings, resources_of(args)))
        return 0
    failed = train(args, settings, runs)
    print_tables(state_table(runs, settings, with_folders=False))
    if args.study not in STUDIES:
        from reproduction.studies.results import write_study_report

        print(f"report: {write_study_report(Path(args.study), settings, runs)}")
    for name, error in failed.items():
        print(f"reproduce.py: {name} failed twice: {error}", file=sys.stderr)
    return int(bool(failed))


def train(args: argparse.Namespace, settings: Settings, runs: list[PlannedRun]) -> dict[str, str]:
    """Trains the runs; returns the errors of those that failed twice."""
    from reproduction.studies import runner

    runner.prepare(runs, settings)
    if args.launcher == "joblib":
        shares = runner.shares(args.jobs, args.devices)
        return runner.train_all_apart(runs, shares, settings.root / ".logs")
    if settings.chosen.is_apart:
        return runner.train_all_apart(runs)
    return runner.train_all(runs, runner.train_here)


if __name__ == "__main__":
    with one_line_errors("reproduce.py"):
        sys.exit(reproduce(parser().parse_args()))
