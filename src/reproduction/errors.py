"""How programs end, and what they say: errors in one line, output, progress."""

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NoReturn, TextIO, TypeVar

from tqdm import tqdm

from reproduction.files import LACKS
from reproduction.machine import is_first_rank

# Signals that end a run: from a terminal, on preemption, or from a launcher.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
LONGEST_LINE = 2000  # characters
log = logging.getLogger("reproduction")


def in_one_line(text: str, longest: int = LONGEST_LINE) -> str:
    """Joins `text` into one line of bounded length."""
    return " ".join(text.split())[:longest]


def first_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def reason_of(error: OSError) -> str:
    """Returns the file of an error of the system, if it has one, and what is wrong with it."""
    if error.filename is None or error.strerror is None:
        return error.strerror or str(error)
    return f"{error.filename}: {error.strerror}"


def counts_text(counts: Mapping[str, int]) -> str:
    """Says how many there are of each."""
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def as_typed(value: object) -> str:
    """Formats a value as on a command line: null, true, [1,2]."""
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ": "), default=str)


class OneLineError(Exception):
    """An error whose message is always one line."""

    status = 1  # of a program that ends with it

    def __init__(self, text: object = ""):
        super().__init__(in_one_line(str(text)))


class UserError(OneLineError):
    """A mistake: `key=value: what is wrong; what is allowed`."""

    status = 2


class PlainError(OneLineError):
    """A failure. The line is sufficient, or a traceback was printed before."""


def of_system(error: OSError) -> OneLineError:
    """An error of the system in one line: a failure if the machine is to blame, else a mistake."""
    if error.errno in LACKS:
        return PlainError(reason_of(error))
    return UserError(reason_of(error))


def message_of(error: Exception) -> str:
    """Returns what to say of an error: messages for users as they are, else the first line."""
    if isinstance(error, OSError):
        return reason_of(error)
    if isinstance(error, OneLineError):
        return str(error)
    return first_line(error)


class Interrupted(OneLineError):
    """A sweep was stopped by a signal."""

    status = 130


class RankFailed(PlainError):
    """A rank was killed, or raised an error that it has printed."""


class Stopped(KeyboardInterrupt):
    """This rank received a signal to stop."""

    def __init__(self, signum: int):
        super().__init__("interrupted")
        self.signum = signum


def program() -> str:
    """The name of the program that runs, with which its lines of errors begin."""
    return Path(sys.argv[0]).name


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends a program with one line: status 2 for a mistake, 1 for a failure, 130 for Ctrl-C."""
    try:
        yield
        say("", end="")  # flushes what print() has left, also into a closed pipe
        return
    except OneLineError as error:
        status, line = error.status, str(error)
    except OSError as error:
        end = of_system(error)
        status, line = end.status, str(end)
    except KeyboardInterrupt as interrupt:
        status, line = 130, str(interrupt) or "interrupted"
    if is_first_rank():
        warn(f"{program()}: {line}")
    sys.exit(status)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def say(text: str, end: str = "\n", to: Literal["stdout", "stderr"] = "stdout") -> None:
    """Prints lines, and logs them where Hydra's log is.

    Gives up what cannot be encoded or written: a run outlives its terminal.
    """
    if text.strip():
        log.info(text)
    stream: TextIO | None = getattr(sys, to)
    try:
        tqdm.write(text, stream, end)  # beside a bar
        if stream is not None:
            stream.flush()
    except UnicodeEncodeError:
        pass
    except OSError:  # a closed pipe, a full disk, a terminal that is gone: also at exit
        with open(os.devnull, "w") as nowhere, suppress(OSError):
            os.dup2(nowhere.fileno(), stream.fileno() if stream is not None else 1)


def warn(text: str) -> None:
    say(text, to="stderr")


Item = TypeVar("Item")


PULSE = 60.0  # seconds between the lines of a bar that is on no terminal


def progress(items: Iterable[Item], task: str, total: int, done: int = 0) -> Iterator[Item]:
    """Yields the items, and counts them in a bar of the first rank; `done` came before."""
    interval = 0.1 if sys.stdout is not None and sys.stdout.isatty() else PULSE
    yield from tqdm(
        items,
        desc=task,
        total=total,
        initial=done,
        leave=False,
        file=sys.stdout,
        mininterval=interval,
        maxinterval=PULSE,
        delay=interval,
        disable=not is_first_rank(),
    )
