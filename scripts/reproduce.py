"""Trains the runs of a table, a row, a sweep or all, or of a study of your own, each run once.

  python scripts/reproduce.py STUDY [seeds=N] [scale=smoke] [jobs=N] [task=N] [dry_run=1] [key=...]

STUDY: table1 to table5, table1/cifar100_htm (one row), sweep-tau, sweep-rho, sweep-kappa, all, or a
.yaml file. seeds: how many, from 0 or first_seed on. scale=smoke: seconds for each run. jobs: runs
at a time, each in a process. task: run 0..n-1 alone, for a job array. dry_run=1: shows the runs and
their status. Other words are overrides of train.py for all rows.
"""

import sys
from dataclasses import replace
from pathlib import Path

from reproduction.studies.study import FULL, SCALES, plan, studies
from reproduction.system.errors import UserError
from reproduction.system.terminal import one_line_errors, say, warn

OWN = ("seeds", "scale", "jobs", "task", "dry_run")


def main(words: list[str]) -> int:
    """Shows or trains the runs, and writes the table of a study of your own; 1 if a run failed."""
    if not words or {"-h", "--help"} & {*words}:
        say(__doc__.strip())
        return 0 if words else 2
    name, *words = words
    own = dict(x.split("=", 1) for x in words if x.partition("=")[0] in OWN)
    more = [x for x in words if x.partition("=")[0] not in OWN]
    if (scale := own.pop("scale", FULL)) not in SCALES:
        raise UserError(f"scale={scale}: must be one of {', '.join(SCALES)}")
    for key, text in own.items():
        if not text.isdecimal() or (key in ("seeds", "jobs") and text == "0"):
            raise UserError(f"{key}={text}: must be a whole number")
    number = {key: int(text) for key, text in own.items()}
    chosen, seeds = studies(name), number.get("seeds")
    runs = plan(chosen, seeds, scale, more)
    from reproduction.studies import launch
    from reproduction.studies.table import listing, read_runs, study_table

    if number.get("dry_run"):
        say(listing(runs))
        return 0
    if "task" in number:
        launch.train_task(runs, number["task"])
    launch.prepare(runs)
    outputs = Path(runs[0].config.output_root)
    failed = launch.train(runs, number.get("jobs"), outputs / ".logs")
    say(listing(runs, with_folders=False))
    for key, study in chosen.items() if name.endswith(".yaml") else ():
        trained = replace(study, seeds=seeds or study.seeds)
        table = study_table(key, trained, read_runs(outputs), scale, more)
        say(f"report: {table.write(outputs)[0]}")
    for run, error in failed.items():
        warn(f"reproduce.py: {run} failed: {error}")
    return int(bool(failed))


if __name__ == "__main__":
    with one_line_errors("reproduce.py"):
        sys.exit(main(sys.argv[1:]))
