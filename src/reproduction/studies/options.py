"""The options that scripts share: a study, its seeds, scale, data, devices and outputs."""

import argparse
import re
from dataclasses import fields

from reproduction.runs.compose import options_of
from reproduction.studies.plan import names
from reproduction.studies.study import FULL, Settings, scales
from reproduction.system.errors import UserError
from reproduction.system.terminal import Parser, positive


def study_parser(description: str | None) -> Parser:
    """Returns the parser of reproduce.py."""
    options = Parser(description=description, allow_abbrev=False)
    options.add_argument("study", help=f"{', '.join(names())}, or a .yaml file as in results/")
    seeds = "; ".join(f"{name}: {scale.seeds}" for name, scale in scales().items())
    options.add_argument("--seeds", type=positive, help=f"0..n-1 (default: {seeds}; figure3: 1)")
    add_settings(options)
    options.add_argument(
        "--launcher",
        choices=("local", "joblib", "slurm"),
        default="local",
        help="one run after another, --jobs at a time, or as a job array for sbatch",
    )
    options.add_argument("--jobs", type=positive, help="runs at a time, also on one GPU")
    mode = options.add_mutually_exclusive_group()
    mode.add_argument("--dry-run", action="store_true", help="show runs and folders, train nothing")
    mode.add_argument("--status", action="store_true", help="show the progress of the runs")
    mode.add_argument("--task", type=int, help="train this run of the plan, as a task of an array")
    group = options.add_argument_group(
        "slurm", "Other options are sbatch's own: --partition gpu --time 24:00:00 --mem 64G"
    )
    group.add_argument("--cpus", type=positive, help="cores of each process (default: 8)")
    group.add_argument("--no-gpu", action="store_const", const=True, help="train on CPUs")
    return options


def add_settings(options: argparse.ArgumentParser) -> None:
    """Adds the options that `settings_of` reads."""
    about = "; ".join(f"{name}: {scale.about}" for name, scale in scales().items())
    options.add_argument("--scale", choices=scales(), default=FULL, help=about)
    options.add_argument(
        "--dataset", choices=options_of("dataset"), help="instead of the tables' own"
    )
    options.add_argument("--data", help="folder of --dataset, else of CIFAR, with imagenet/ in it")
    options.add_argument("--devices", type=positive, default=1, help="processes, one GPU each")
    options.add_argument("--outputs", default="outputs", help="folder of all runs")


def settings_of(args: argparse.Namespace) -> Settings:
    return Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})


def check_launcher(args: argparse.Namespace, others: list[str]) -> None:
    """Raises UserError for options that the launcher does not use; `others` are for sbatch."""
    if others and args.launcher != "slurm":
        raise UserError(f"unrecognized arguments: {' '.join(others)}; see --help")
    if any(re.match(r"--nodes\b|-N", word) for word in others):
        raise UserError("nodes: must be left out, a task of an array uses one node")
    if args.launcher == "slurm" and args.jobs is not None:
        raise UserError(f"jobs={args.jobs}: must be left out with launcher=slurm")
    for name in ("cpus", "no_gpu") if args.launcher != "slurm" else ():
        value = getattr(args, name)
        if value is not None and args.task is None:
            raise UserError(f"{name}={value}: goes with launcher=slurm only")


def command_line(args: argparse.Namespace) -> list[str]:
    """Returns the words that plan the same runs: study, seeds and settings."""
    own = {"seeds": args.seeds, **vars(settings_of(args))}
    options = [f"--{key}={value}" for key, value in own.items() if value is not None]
    return [args.study, *options, *(["--no-gpu"] if args.no_gpu else [])]
