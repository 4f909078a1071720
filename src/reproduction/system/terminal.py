"""What is printed, whoever reads it, and what scripts share: arguments, tables."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from reproduction.system.errors import PlainError, UserError, in_one_line

WIDTH = 180  # of a table where there is no terminal to fit


class Parser(argparse.ArgumentParser):
    """Raises UserError for what it cannot read."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def positive(text: str) -> int:
    """The type of an argument that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return int(text)


@contextmanager
def ending_in_a_line(program: str) -> Iterator[None]:
    """How a script ends: 2 for what the user typed wrong, 1 for a failure, 130 for Ctrl-C.

    Also as a decorator of its main function.
    """
    try:
        yield
    except (UserError, OSError) as error:
        status, line = 2, in_one_line(str(error))
    except PlainError as error:
        status, line = 1, str(error)
    except KeyboardInterrupt as interrupt:
        status, line = 130, str(interrupt) or "interrupted"
    else:
        return
    print(f"{program}: {line}", file=sys.stderr)
    sys.exit(status)


def print_tables(*tables: Any) -> None:
    """Tables of rich's, which train.py never imports."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else WIDTH).print(*tables, sep="\n")


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
