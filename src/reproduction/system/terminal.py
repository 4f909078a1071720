"""Printing, argument parsing and error handling for the scripts."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from reproduction.system.errors import PlainError, UserError, in_one_line
from reproduction.system.ranks import is_first_rank


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def positive(text: str) -> int:
    """Argument type of a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return int(text)


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Exits a script with one line: status 2 for a user error, 1 for a failure, 130 for Ctrl-C.

    Can also decorate its main function.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return
    except (UserError, OSError) as error:
        status, line = 2, in_one_line(str(error))
    except PlainError as error:
        status, line = 1, str(error)
    except KeyboardInterrupt as interrupt:
        status, line = 130, str(interrupt) or "interrupted"
    else:
        return
    if is_first_rank():
        print(f"{program}: {line}", file=sys.stderr)
    sys.exit(status)


def say(text: str) -> None:
    """Prints lines. If stdout is closed, as after `| head -1`, discards all further output."""
    try:
        print(text, flush=True)
    except OSError:  # also a log file on a full disk
        _discard_output()


def _discard_output() -> None:
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())  # the interpreter flushes again at exit
    os.close(devnull)


def warn(text: str) -> None:
    """Prints lines to stderr; ignores errors if it is closed."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
