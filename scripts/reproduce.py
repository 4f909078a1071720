"""Trains the runs of a table, figure, sweep or all, or of a study of your own, each run once."""

import argparse
import sys
from dataclasses import replace

from reproduction.studies.options import study_parser, study_settings
from reproduction.studies.plan import PlannedRun, plan, studies_of
from reproduction.studies.study import Settings
from reproduction.system.errors import UserError
from reproduction.system.terminal import one_line_errors, say, warn


def reproduce(words: list[str]) -> int:
    """Shows or trains the runs; returns 1 if a run failed."""
    args = study_parser(__doc__).parse_args(words)
    if args.no_gpu and args.task is None:
        raise UserError("no-gpu: goes with --task only")
    settings = study_settings(args)
    runs = plan(args.study, settings, args.seeds)
    if args.task is not None:
        from reproduction.studies.launch import train_task

        train_task(runs, args.task, "cpu" if args.no_gpu else "cuda")
    elif args.dry_run or args.status:
        from reproduction.studies.status import state_table

        say(state_table(runs, with_folders=args.dry_run))
    else:
        return _train(args, settings, runs)
    return 0


def _train(args: argparse.Namespace, settings: Settings, runs: list[PlannedRun]) -> int:
    from reproduction.studies import launch
    from reproduction.studies.results import results_of
    from reproduction.studies.status import state_table
    from reproduction.studies.table import report_folder

    launch.prepare(runs, settings)
    if args.jobs:
        from reproduction.start.processes import shares

        logs = settings.root / ".logs"
        failed = launch.train_all_apart(runs, shares(args.jobs, args.devices), logs)
    elif settings.chosen.apart:
        failed = launch.train_all_apart(runs)
    else:
        failed = launch.train_all(runs, launch.train_here)
    say(state_table(runs, with_folders=False))
    if args.study.endswith(".yaml"):
        ((name, study),) = studies_of(args.study).items()
        trained = replace(study, seeds=args.seeds or study.seeds)
        (one,), _ = results_of({name: trained}, settings)
        say(f"report: {one.write(report_folder(settings.root))[0]}")
    for name, error in failed.items():
        warn(f"reproduce.py: {name} failed: {error}")
    return int(bool(failed))


if __name__ == "__main__":
    with one_line_errors("reproduce.py"):
        sys.exit(reproduce(sys.argv[1:]))
