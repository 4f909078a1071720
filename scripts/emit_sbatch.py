"""Prints a SLURM job array that trains the unfinished runs of a table, a sweep or all of them."""

import argparse
import sys
from contextlib import redirect_stdout

from reproduction.studies.options import name_of, resources_of, runs_of, settings_of, study_parser
from reproduction.studies.slurm import NOTHING_LEFT, array_script
from reproduction.system.terminal import ending_in_a_line


def emit(args: argparse.Namespace) -> int:
    """Status 1 if there is nothing to submit."""
    settings, runs, resources = settings_of(args), runs_of(args), resources_of(args)
    with redirect_stdout(sys.stderr):  # of downloads
        script = array_script(name_of(args), runs, settings, resources)
    if script is None:
        print(f"emit_sbatch.py: {NOTHING_LEFT}", file=sys.stderr)
        return 1
    print(script, end="")
    return 0


if __name__ == "__main__":
    with ending_in_a_line("emit_sbatch.py"):
        sys.exit(emit(study_parser(__doc__).parse_args()))
