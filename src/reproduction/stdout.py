"""What is printed while work is done: the work does not depend on who reads it."""

import os
import sys


def say(text: str) -> None:
    """Prints a line; once nobody reads, as after `| head -1`, everything more goes nowhere."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # the interpreter flushes once more at its end
        os.close(nowhere)
