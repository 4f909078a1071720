"""What all modules use: errors, output, files, ranks and hardware."""

import argparse
import ctypes
import errno
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn, TextIO, TypeVar

from tqdm import tqdm

# --- errors: how a program ends -----------------------------------------------------------------

# Signals that end a run: from a terminal, on preemption, or from a launcher.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
LONGEST_LINE = 2000  # characters


def in_one_line(text: str, longest: int = LONGEST_LINE) -> str:
    """Joins `text` into one line of bounded length, with `?` for unprintable characters."""
    line = " ".join(text.split())
    line = "".join(x if x.isprintable() else "?" for x in line)
    if len(line) > longest:
        line = f"{line[: longest - 3]}..."
    return line


def first_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def reason_of(error: OSError) -> str:
    """Returns the file of an error of the system, if it has one, and what is wrong with it."""
    if error.filename is None or error.strerror is None:
        return error.strerror or str(error)
    return f"{error.filename}: {error.strerror}"


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
    hide_warnings()
    try:
        yield
        say("", end="")  # flushes what print() has left, also into a closed pipe
        return
    except OneLineError as error:
        status, line = error.status, str(error)
    except OSError as error:
        status, line = 2, in_one_line(reason_of(error))
    except KeyboardInterrupt as interrupt:
        status, line = 130, str(interrupt) or "interrupted"
    if is_first_rank():
        warn(f"{program()}: {line}")
    sys.exit(status)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


# --- output -------------------------------------------------------------------------------------


def say(text: str, end: str = "\n", to: Literal["stdout", "stderr"] = "stdout") -> None:
    """Prints lines. Gives up what cannot be encoded or written: a run outlives its terminal."""
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


def progress(items: Iterable[Item], task: str, total: int, done: int = 0) -> Iterator[Item]:
    """Yields the items, and counts them on the first rank's terminal; `done` came before."""
    yield from tqdm(
        items,
        desc=task,
        total=total,
        initial=done,
        leave=False,
        file=sys.stdout,
        disable=None if is_first_rank() else True,  # None: shown on a terminal alone
    )


PULSE = 60.0  # seconds between lines of a run whose output is no terminal


class Pulse:
    """When the first rank shall say that it is alive, where `progress` shows no bar."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def is_due(self) -> bool:
        has_bar = sys.stdout is not None and sys.stdout.isatty()
        return is_first_rank() and not has_bar and time.monotonic() - self.last >= PULSE

    def tell(self, text: str) -> None:
        self.last = time.monotonic()
        say(text)


def hide_warnings() -> None:
    """Hides Pillow's warnings in a program of ours: they name no file."""
    warnings.filterwarnings("ignore", module=r"PIL\.")


# --- files --------------------------------------------------------------------------------------


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder, which then replaces `path`, unless it fails.

    After a loss of power `path` is the old file or the new one. Processes that write the same
    file do not disturb each other: the last one counts.
    """
    temporary = path.with_name(f".{path.name}.{_host()}-{os.getpid()}.tmp")
    try:
        yield temporary
        flush(temporary)
        os.replace(temporary, path)
        flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems have no such call
            raise
    finally:
        os.close(descriptor)


def _host() -> str:
    return socket.gethostname().replace(".", "-")


def is_left_over(temporary: Path) -> bool:
    """Whether the process of this machine that began to write a temporary file is gone."""
    name = re.fullmatch(r"\..+\.(.+)-(\d+)\.tmp", temporary.name)  # as `replacing` gives it
    if name is None or name[1] != _host():
        return False
    try:
        os.kill(int(name[2]), 0)  # sends nothing
    except ProcessLookupError:
        return True
    except PermissionError:  # of another user
        pass
    return False


# --- ranks and hardware -------------------------------------------------------------------------

CORES = "LOKY_MAX_CPU_COUNT"  # environment variable: cores for this run, if several run at a time
MEETING = "REPRODUCTION_MEETING"  # the file at which ranks meet that a run has started itself
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of mallopt(3)


def launched_ranks() -> int | None:
    """Returns the world size in a rank of torchrun or of training/ranks.py, None otherwise."""
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ or MEETING in os.environ
    if not is_launched or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["WORLD_SIZE"])


def local_ranks(devices: int) -> int:
    """Returns the number of ranks on this machine: as launched, else `devices`."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", devices))


def is_first_rank() -> bool:
    """Whether this process prints and writes files for all ranks."""
    return launched_ranks() is None or os.environ.get("RANK", "0") == "0"


def usable_cores() -> int:
    """Returns the cores of this process: by machine, affinity, container and CORES."""
    from joblib import cpu_count  # takes a moment to import

    return cpu_count()


def hardware_name(device: str) -> str:
    """Returns the name of the GPU, unless there is none, or of the processor with its cores."""
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    with suppress(OSError):  # Linux only
        model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
        if model is not None:
            name = model[1]
    return f"{name} ({usable_cores()} cores)"


def git_revision() -> str | None:
    """The commit of this code, with `-dirty` if files have changed; None outside a repository."""
    here = Path(__file__)
    # git exports GIT_DIR and others to its hooks: those would name another repository
    environment = {name: x for name, x in os.environ.items() if not name.startswith("GIT_")}
    git = partial(
        subprocess.run,
        cwd=here.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    try:
        # an installed package may lie in the repository of another project
        git(["git", "ls-files", "--error-unmatch", here.name])
        return git(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def keep_freed_memory() -> None:
    """Makes glibc reuse freed memory; by default every step pays for new, zeroed pages."""
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(TRIM_THRESHOLD, -1)  # never
        mallopt(MMAP_MAX, 0)
