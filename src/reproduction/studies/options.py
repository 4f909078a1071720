"""The command line of the scripts that reproduce a study: its runs and their SLURM resources."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from reproduction.reporting.cells import FULL, SCALES, about
from reproduction.runs.compose import options_of
from reproduction.studies.own import plan_own
from reproduction.studies.plan import STUDIES, PlannedRun, Settings, plan
from reproduction.studies.slurm import Resources
from reproduction.system.errors import UserError
from reproduction.system.terminal import Parser, positive

SEEDS = "figure3: 1; " + "; ".join(f"{name}: {scale.seeds}" for name, scale in SCALES.items())


def study_parser(description: str | None) -> Parser:
    options = Parser(description=description)
    options.add_argument(
        "study", type=_study, help=f"{', '.join(STUDIES)}, or a .yaml file like those in results/"
    )
    options.add_argument("--seeds", type=positive, help=f"0..n-1 (default: {SEEDS})")
    add_settings(options)
    group = options.add_argument_group("SLURM resources of each run")
    group.add_argument("--partition", help="as for sbatch")
    group.add_argument("--account", help="as for sbatch")
    group.add_argument("--time", help="as for sbatch; the next task resumes an unfinished run")
    group.add_argument("--memory", help="of each node, such as 64G")
    group.add_argument("--cpus", type=positive, help="cores of each process (default: 8)")
    group.add_argument("--nodes", type=positive, help="that share the devices (default: 1)")
    group.add_argument("--no-gpu", action="store_const", const=True, help="train on CPUs")
    group.add_argument("--parallel", type=positive, help="maximum number of runs at a time")
    group.add_argument("--sbatch", action="append", help="further options: --sbatch=--qos=x")
    return options


def add_settings(options: argparse.ArgumentParser) -> None:
    """Adds the options that `settings_of` reads."""
    options.add_argument("--scale", choices=SCALES, default=FULL, help=about())
    options.add_argument(
        "--dataset", choices=options_of("dataset"), help="instead of the tables' own"
    )
    options.add_argument("--data", help="its folder; without --dataset that of CIFAR and imagenet/")
    options.add_argument("--devices", type=positive, default=1, help="processes, one GPU each")
    options.add_argument("--outputs", default="outputs", help="folder of all runs")


def _study(text: str) -> str:
    if text in STUDIES or (text.endswith(".yaml") and Path(text).is_file()):
        return text
    allowed = f"must be one of {', '.join(STUDIES)}, or an existing .yaml file"
    raise argparse.ArgumentTypeError(f"{text}: {allowed}")


def settings_of(args: argparse.Namespace) -> Settings:
    return Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})


def runs_of(args: argparse.Namespace) -> list[PlannedRun]:
    settings = settings_of(args)
    if args.study not in STUDIES:
        return plan_own(Path(args.study), settings, args.seeds)
    return plan(args.study, settings, args.seeds)


def resources_of(args: argparse.Namespace) -> Resources:
    return Resources(devices=args.devices, **_resource_options(args))


def check_launcher(args: argparse.Namespace) -> None:
    """Raises UserError for options that the launcher does not use."""
    if args.jobs is not None and args.launcher != "joblib":
        raise UserError(f"jobs={args.jobs}: goes with launcher=joblib only")
    if args.launcher != "slurm":
        if args.script:
            raise UserError("script: goes with launcher=slurm only")
        for name, value in _resource_options(args).items():
            raise UserError(f"{name}={value}: goes with launcher=slurm only")


def _resource_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of Resources that are on the command line."""
    names = [field.name for field in fields(Resources) if field.name != "devices"]
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}
