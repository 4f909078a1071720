"""Trains the runs of a table, a row, a sweep or all, or of a study of your own, each run once.

STUDY: table1 to table5, table1/cifar100_htm (one row), sweep-tau, sweep-rho, sweep-kappa, all, or a
.yaml file. Overrides are train.py's, for all rows, and two more: seeds=N (how many, from 0 or
first_seed on) and scale=smoke (seconds for each run). jobs=N, task=N and dry_run=1 are about
training; with --no-train the tables of the runs that are there are written instead.
"""

import sys
from collections.abc import Sequence
from dataclasses import fields

from reproduction.application import application
from reproduction.compose import in_quotes, key_of, with_overrides
from reproduction.config import Command, StudyOptions, validated
from reproduction.errors import Parser, UserError, one_line_errors
from reproduction.studies.study import FULL
from reproduction.sweep import Sweep
from train import main as train

OF_SWEEPER = ("seeds=", "scale=")
OF_TRAINING = {field.name for field in fields(Command)}


def train_study(options: Sequence[str], overrides: Sequence[str]) -> None:
    """Trains by train.py's sweeper: python train.py -m hydra/sweeper=study ..."""
    of_sweeper = [f"hydra.sweeper.{option}" for option in options]
    sys.argv[1:] = ["-m", "hydra/sweeper=study", *of_sweeper, *overrides]
    with application():
        train()


def write_tables(study: str, options: Sequence[str], overrides: Sequence[str]) -> None:
    """Writes the tables of the runs that are there; UserError for an override about training."""
    for override in overrides:
        key = key_of(override)
        if key in OF_TRAINING or key.startswith("hydra"):
            raise UserError(f"{override}: nothing reads it with --no-train")
    asked = with_overrides({"study": study, "seeds": None, "scale": FULL}, options)
    sweep = Sweep.of_study(validated(StudyOptions, asked), overrides)
    outputs = sweep.plans[0].path.parent
    if not outputs.is_dir():
        raise UserError(f"output_root={outputs}: must be a folder of runs")
    sweep.write_tables()


@one_line_errors()
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("study", metavar="STUDY")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--no-train", action="store_true", help="write the tables, train nothing")
    args = parser.parse_intermixed_args()
    options = [x for x in args.overrides if x.startswith(OF_SWEEPER)]
    overrides = [x for x in args.overrides if not x.startswith(OF_SWEEPER)]
    if args.no_train:
        write_tables(args.study, options, overrides)
    else:
        train_study([*options, f"study={in_quotes(args.study)}"], overrides)


if __name__ == "__main__":
    main()
