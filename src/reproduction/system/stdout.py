"""What is printed while work is done: the work does not depend on who reads it."""

import os
import sys
from contextlib import suppress


def say(text: str) -> None:
    """Prints a line; once nobody reads, as after `| head -1`, everything more goes nowhere."""
    try:
        print(text, flush=True)
    except OSError:  # also of a log file on a full disk
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # the interpreter flushes once more at its end
        os.close(nowhere)


def warn(text: str) -> None:
    """Prints on stderr; as with `say`, whether anybody reads it changes nothing."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
