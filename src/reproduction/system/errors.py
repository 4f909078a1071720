"""Exceptions that end a program: user errors, failed runs and interrupted runs."""

import signal

# Signals that end a run: from a terminal, on preemption, or from a launcher.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
LONGEST_LINE = 2000  # characters per line


def in_one_line(text: str, longest: int = LONGEST_LINE) -> str:
    """Joins `text` into one line of bounded length, with `?` for unprintable characters."""
    line = " ".join("".join(x if x.isprintable() or x.isspace() else "?" for x in text).split())
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


class OneLineError(Exception):
    """An error whose message is always one line."""

    def __init__(self, text: object = ""):
        super().__init__(in_one_line(str(text)))


class UserError(OneLineError):
    """Invalid input, exit status 2. The line names key, value and what is allowed."""


class RunLocked(UserError):
    """Another process is training this run."""


class PlainError(OneLineError):
    """A failure, exit status 1. Printed without a traceback, as the line is sufficient.

    For a failed run, its summary has the status and any traceback was printed earlier.
    """


class RankFailed(PlainError):
    """A rank was killed, or raised an error that it has printed."""


class Stopped(KeyboardInterrupt):
    """The process received a signal to stop."""

    def __init__(self, signum: int):
        super().__init__("interrupted")
        self.signum = signum


class RunInterrupted(KeyboardInterrupt):
    """An interrupted run, exit status 130. Its summary has the status `interrupted`."""


def first_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
