"""Trains a run, or a sweep of runs.

  python train.py [group=option ...] [key=value ...] [resume=auto]
  python train.py -m key=value1,value2 ... [jobs=N] [task=N]

-m trains every combination of the values; jobs=N runs at a time, each in a process; task=N is only
run N of them, from 0, as in an array of jobs. dry_run=1 shows the runs and trains none, --cfg job
shows the configuration, --help what is allowed.
"""

import sys

from reproduction.help import help_text
from reproduction.launch import end, run_all
from reproduction.runs import as_yaml
from reproduction.start import compose, expand, point, take
from reproduction.system import Parser, UserError, launched_ranks, one_line_errors, say


def main() -> int:
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("-h", "--help", action="store_true")
    options = parser.parse_intermixed_args()
    numbers, words = take(options.words, jobs=1, task=0, dry_run=0)
    if options.help:
        say(f"{__doc__}\n{help_text(compose(words))}")
        return 0
    each = expand(words)
    if not options.multirun and (len(each) > 1 or numbers.keys() & {"jobs", "task"}):
        needs = "several values, jobs and task need -m; a list needs brackets: key=[a,b]"
        raise UserError(f"{' '.join(options.words)}: {needs}")
    if options.multirun and launched_ranks() is not None:
        raise UserError("-m: start a sweep as train.py -m devices=N, without torchrun")
    points = [point(x) for x in each]
    if options.cfg:
        say("---\n".join(as_yaml(x.config) for x in points), end="")
        return 0
    if numbers.pop("dry_run", 0):
        from reproduction.studies.conclude import listing

        say(listing(points))
        return 0
    status = end("train.py", run_all(points, **numbers))
    if len(points) > 1 and "task" not in numbers:
        from reproduction.studies.conclude import conclude

        conclude(points)
    return status


if __name__ == "__main__":
    with one_line_errors("train.py"):
        sys.exit(main())
