"""How a program ends: what the user typed wrong, a run that failed, a run that was interrupted."""

import signal

# What a terminal, a cluster that takes its machine back, and launchers send to end a run.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
LONGEST = 2000  # characters of a line


def in_one_line(text: str, longest: int = LONGEST) -> str:
    """`text` in one line of bounded length; `?` for what cannot be printed."""
    line = " ".join("".join(x if x.isprintable() or x.isspace() else "?" for x in text).split())
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


class Told(Exception):
    """Told in one line, whatever a value, a path or a library has put into it."""

    def __init__(self, text: object = ""):
        super().__init__(in_one_line(str(text)))


class UserError(Told):
    """Status 2 and its one line: key, value and what is allowed. Nothing has happened."""


class RunLocked(UserError):
    """Another process is training this run."""


class PlainError(Told):
    """Status 1 and its one line, which tells the cause whole: nobody needs a traceback.

    Of a run that failed the folder says so, and what is not plain was printed before.
    """


class RankFailed(PlainError):
    """A rank has raised an error, which it has printed, or was killed."""


class Stopped(KeyboardInterrupt):
    """A signal has asked the run to end."""

    def __init__(self, signum: int):
        super().__init__("interrupted")
        self.signum = signum


class RunInterrupted(KeyboardInterrupt):
    """Status 130 and its one line; the folder says `interrupted`."""


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
