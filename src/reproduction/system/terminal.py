"""Printing, argument parsing and error handling for the scripts."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO

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
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
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
        warn(f"{program}: {line}")
    sys.exit(status)


def say(text: str) -> None:
    """Prints lines to stdout; all is given up that it cannot take, as after `| head -1`."""
    _write(sys.stdout, f"{text}\n")


def warn(text: str) -> None:
    """Prints lines to stderr, as `say`."""
    _write(sys.stderr, f"{text}\n")


class Screen:
    """Stdout as a file for rich, which writes as `say` does."""

    def __init__(self) -> None:
        self.stream = sys.stdout

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> None:
        _write(self.stream, text)


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # closed, as by >&-
        return
    try:
        stream.write(text)
        stream.flush()
    except OSError:  # a closed pipe, a full disk, a terminal that is gone
        _discard(stream)


def _discard(stream: TextIO) -> None:
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())  # the interpreter flushes again at exit
    os.close(devnull)
