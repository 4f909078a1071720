"""Trains the runs of a table, figure, sweep or all, and no run twice. See also `make help`."""

import argparse
import sys

from reproduction.cli import one_line
from reproduction.errors import UserError
from reproduction.plan import DATASET_OPTIONS, STUDIES, Settings, default_seeds, plan
from reproduction.scales import FULL, SCALES, about
from reproduction.states import state_table
from reproduction.terminal import Parser, positive, print_tables

SEEDS = "figure3: 1; " + "; ".join(f"{name}: {scale.seeds}" for name, scale in SCALES.items())


def parser() -> Parser:
    options = Parser(description=__doc__)
    options.add_argument("study", choices=STUDIES, help="what to reproduce")
    options.add_argument("--seeds", type=positive, help=f"0..n-1 (default: {SEEDS})")
    options.add_argument("--scale", choices=SCALES, default=FULL, help=about())
    options.add_argument("--dataset", choices=DATASET_OPTIONS, help="in place of the table's own")
    options.add_argument("--data", help="its folder; without --dataset that of CIFAR and imagenet/")
    options.add_argument("--devices", type=positive, default=1, help="processes, one GPU each")
    options.add_argument("--outputs", default="outputs", help="folder of all runs")
    shown = options.add_mutually_exclusive_group()
    shown.add_argument("--dry-run", action="store_true", help="show runs and folders, do nothing")
    shown.add_argument("--status", action="store_true", help="show how far the runs are")
    return options


def reproduce(args: argparse.Namespace) -> int:
    """Shows the runs, or trains them; status 1 if one failed twice."""
    settings = Settings(
        scale=args.scale,
        dataset=args.dataset,
        data=args.data,
        devices=args.devices,
        outputs=args.outputs,
    )
    runs = plan(args.study, settings, args.seeds or default_seeds(args.study, settings))
    if args.dry_run or args.status:
        print_tables(state_table(runs, settings, with_folders=args.dry_run))
        return 0
    from reproduction.runner import prepare, train_all, train_apart, train_here

    prepare(runs, settings)
    failed = train_all(runs, train_apart if settings.chosen.is_apart else train_here)
    print_tables(state_table(runs, settings, with_folders=False))
    for name, error in failed.items():
        print(f"reproduce.py: {name} failed twice: {error}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    try:
        sys.exit(reproduce(parser().parse_args()))
    except (UserError, OSError) as error:
        print(f"reproduce.py: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as interrupt:
        print(f"reproduce.py: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        sys.exit(130)
