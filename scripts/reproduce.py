"""Trains the runs of a table, a row, a sweep or all, or of a study of your own, each run once.

  python -m scripts.reproduce STUDY [seeds=N] [scale=smoke] [jobs=N] [task=N] [dry_run=1] [key=...]

STUDY: table1 to table5, table1/cifar100_htm (one row), sweep-tau, sweep-rho, sweep-kappa, all, or a
.yaml file. seeds: how many, from 0 or first_seed on. scale=smoke: seconds for each run. jobs: runs
at a time, each in a process. task: run 0..n-1 alone, for a job array. dry_run=1: shows the runs and
their status. Other words are overrides of train.py for all rows.
"""

import sys

from reproduction.launch import end, run_all
from reproduction.start import take
from reproduction.studies.study import FULL, SCALES, plan, studies
from reproduction.system import UserError, one_line_errors, say


def main(words: list[str]) -> int:
    """Shows or trains the runs, and prints and writes their tables; returns the exit status."""
    if {"-h", "--help"} & {*words}:
        say(__doc__.strip())
        return 0
    own, words = take(words, seeds=1, jobs=1, task=0, dry_run=0)
    name, *more = words or [""]
    scales = [word.partition("=")[2] for word in more if word.startswith("scale=")]
    more = [word for word in more if not word.startswith("scale=")]
    if (scale := (scales or [FULL])[-1]) not in SCALES:
        raise UserError(f"scale={scale}: must be one of {', '.join(SCALES)}")
    if seeded := [word for word in more if word.startswith("seed=")]:
        raise UserError(f"{seeded[0]}: must be seeds=N, how many, from the study's first_seed on")
    points = plan(studies(name), own.get("seeds"), scale, more)
    from reproduction.studies.conclude import conclude, listing

    if own.get("dry_run"):
        say(listing(points))
        return 0
    status = end("reproduce.py", run_all(points, own.get("jobs"), own.get("task")))
    if "task" not in own:
        conclude(points)
    return status


if __name__ == "__main__":
    with one_line_errors("reproduce.py"):
        sys.exit(main(sys.argv[1:]))
