"""Trains the runs of a table, a row, a sweep or all, or of a study of your own, each run once.

  python -m scripts.reproduce STUDY [seeds=N] [scale=smoke] [jobs=N] [task=N] [dry_run=1] [key=...]

STUDY: table1 to table5, table1/cifar100_htm (one row), sweep-tau, sweep-rho, sweep-kappa, all, or a
.yaml file. seeds: how many, from 0 or first_seed on. scale=smoke: seconds for each run. The other
overrides are train.py's, whose sweeper `study` does it:

  python train.py -m hydra/sweeper=study hydra.sweeper.study=STUDY [hydra.sweeper.seeds=N] ...
"""

import sys

from reproduction.application import application
from reproduction.compose import in_quotes
from reproduction.errors import say
from train import main as train

OF_SWEEPER = ("seeds=", "scale=")


def main(overrides: list[str]) -> None:
    if {"-h", "--help"} & {*overrides}:
        say(__doc__.strip())
        return
    name, *more = overrides or [""]  # the error for an empty name lists what is allowed
    sys.argv[1:] = ["-m", "hydra/sweeper=study", f"hydra.sweeper.study={in_quotes(name)}"]
    for override in more:
        prefix = "hydra.sweeper." if override.startswith(OF_SWEEPER) else ""
        sys.argv.append(prefix + override)
    with application():
        train()


if __name__ == "__main__":
    main(sys.argv[1:])
