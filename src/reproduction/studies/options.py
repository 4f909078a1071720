"""The options that scripts share: a study, its seeds, scale, data, devices and outputs."""

import argparse
from dataclasses import fields

from reproduction.runs.compose import group_options
from reproduction.studies.plan import names
from reproduction.studies.study import FULL, Settings, scales
from reproduction.system.terminal import Parser, positive


def study_parser(description: str | None) -> Parser:
    """Returns the parser of reproduce.py."""
    options = Parser(description=description, allow_abbrev=False)
    options.add_argument("study", help=f"{', '.join(names())}, or a .yaml file as in results/")
    seeds = "; ".join(f"{name}: {scale.seeds}" for name, scale in scales().items())
    about = f"how many, from 0 or first_seed on (default: {seeds}; figure3: 1)"
    options.add_argument("--seeds", type=positive, help=about)
    add_settings(options)
    options.add_argument("--jobs", type=positive, help="runs at a time, also on one GPU")
    mode = options.add_mutually_exclusive_group()
    mode.add_argument("--dry-run", action="store_true", help="show runs and folders, train nothing")
    mode.add_argument("--status", action="store_true", help="show the progress of the runs")
    mode.add_argument(
        "--task", type=int, help="train run 0..n-1, as a task of a job array; needs a GPU"
    )
    options.add_argument("--no-gpu", action="store_true", help="with --task: train on CPUs")
    return options


def add_settings(options: argparse.ArgumentParser) -> None:
    """Adds the options that `study_settings` reads."""
    about = "; ".join(f"{name}: {scale.about}" for name, scale in scales().items())
    options.add_argument("--scale", choices=scales(), default=FULL, help=about)
    options.add_argument(
        "--dataset", choices=group_options("dataset"), help="instead of the tables' own"
    )
    options.add_argument("--data", help="folder of --dataset, else of CIFAR, with imagenet/ in it")
    options.add_argument("--devices", type=positive, default=1, help="processes, one GPU each")
    options.add_argument("--outputs", default="outputs", help="folder of all runs")


def study_settings(args: argparse.Namespace) -> Settings:
    return Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
