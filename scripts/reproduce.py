"""Trains the runs of a table, figure, sweep or all, or of a study of your own, each run once."""

import argparse
import sys
from pathlib import Path

from reproduction.studies.options import check_launcher, command_line, settings_of, study_parser
from reproduction.studies.plan import PlannedRun, plan, studies_of
from reproduction.studies.study import Settings
from reproduction.system.terminal import one_line_errors, say


def reproduce(words: list[str]) -> int:
    """Shows, schedules or trains the runs; returns 1 if a run failed."""
    args, others = study_parser(__doc__).parse_known_args(words)
    check_launcher(args, others)
    settings = settings_of(args)
    runs = plan(args.study, settings, args.seeds)
    if args.task is not None:
        from reproduction.studies.launch import train_task

        train_task(runs, args.task, "cpu" if args.no_gpu else "cuda")
    elif args.dry_run or args.status:
        from reproduction.studies.status import state_table

        say(state_table(runs, with_folders=args.dry_run))
    elif args.launcher == "slurm":
        say(_array(args, others, settings, runs))
    else:
        return _train(args, settings, runs)
    return 0


def _train(args: argparse.Namespace, settings: Settings, runs: list[PlannedRun]) -> int:
    from reproduction.studies import launch
    from reproduction.studies.results import results_of
    from reproduction.studies.status import state_table
    from reproduction.studies.tables import report_folder

    launch.prepare(runs, settings)
    if args.jobs or args.launcher == "joblib":
        logs, shares = settings.root / ".logs", launch.shares(args.jobs, args.devices)
        failed = launch.train_all_apart(runs, shares, logs)
    elif settings.chosen.apart:
        failed = launch.train_all_apart(runs)
    else:
        failed = launch.train_all(runs, launch.train_here)
    say(state_table(runs, with_folders=False))
    if args.study.endswith(".yaml"):
        (one,), *_ = results_of(studies_of(args.study), settings)
        say(f"report: {one.write(report_folder(settings.root))[0]}")
    for name, error in failed.items():
        print(f"reproduce.py: {name} failed: {error}", file=sys.stderr)
    return int(bool(failed))


def _array(
    args: argparse.Namespace, others: list[str], settings: Settings, runs: list[PlannedRun]
) -> str:
    from reproduction.studies import launch

    resources = launch.Resources(
        devices=args.devices,
        cpus=args.cpus or 8,
        no_gpu=bool(args.no_gpu),
        sbatch=[*launch.sbatch_options(others)],
    )
    if all(run.is_done() for run in runs):
        return "nothing to submit: all runs are finished"
    launch.prepare(runs, settings, here=False)
    words = [str(Path(__file__).absolute()), *command_line(args)]
    path = launch.write_array(Path(args.study).stem, words, runs, settings.root, resources)
    return f"written; submit it with\nsbatch {path}"


if __name__ == "__main__":
    with one_line_errors("reproduce.py"):
        sys.exit(reproduce(sys.argv[1:]))
