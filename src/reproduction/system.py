"""What all rooms use: errors, output, files, ranks and hardware."""

import argparse
import ctypes
import errno
import math
import os
import platform
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar
from uuid import uuid4

# --- errors: how a program ends -----------------------------------------------------------------

# Signals that end a run: from a terminal, on preemption, or from a launcher.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
LONGEST_LINE = 2000  # characters


def in_one_line(text: str, longest: int = LONGEST_LINE) -> str:
    """Joins `text` into one line of bounded length, with `?` for unprintable characters."""
    line = " ".join("".join(x if x.isprintable() or x.isspace() else "?" for x in text).split())
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def first_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class OneLineError(Exception):
    """An error whose message is always one line."""

    def __init__(self, text: object = ""):
        super().__init__(in_one_line(str(text)))


class UserError(OneLineError):
    """A mistake, exit status 2: `key=value: what is wrong; what is allowed`."""


class RunLocked(UserError):
    """Another process is training this run."""


class PlainError(OneLineError):
    """A failure, exit status 1. The line is sufficient, or a traceback was printed before."""


class RankFailed(PlainError):
    """A rank was killed, or raised an error that it has printed."""


class Stopped(KeyboardInterrupt):
    """The process received a signal to stop."""

    def __init__(self, signum: int):
        super().__init__("interrupted")
        self.signum = signum


class RunInterrupted(KeyboardInterrupt):
    """An interrupted run, exit status 130. Its summary has the status `interrupted`."""


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Ends a program with one line: status 2 for a mistake, 1 for a failure, 130 for Ctrl-C."""
    try:
        yield
        say("", end="")  # what print() has left; nobody may read it
        return
    except (UserError, OSError) as error:
        status, line = 2, in_one_line(str(error))
    except PlainError as error:
        status, line = 1, str(error)
    except KeyboardInterrupt as interrupt:
        status, line = 130, str(interrupt) or "interrupted"
    if is_first_rank():
        warn(f"{program}: {line}")
    sys.exit(status)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def positive(text: str) -> int:
    """Argument type of a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return int(text)


# --- output -------------------------------------------------------------------------------------


def say(text: str, end: str = "\n") -> None:
    """Prints lines to stdout."""
    _print(sys.stdout, text, end)


def warn(text: str) -> None:
    """Prints lines to stderr."""
    _print(sys.stderr, text, "\n")


def _print(stream: TextIO | None, text: str, end: str) -> None:
    """Gives output up that cannot be encoded or written: a run outlives its terminal."""
    try:
        print(text, end=end, file=stream, flush=stream is not None)
    except UnicodeEncodeError:
        pass
    except OSError:  # a closed pipe, a full disk, a terminal that is gone: also at exit
        with open(os.devnull, "w") as nowhere, suppress(OSError):
            os.dup2(nowhere.fileno(), stream.fileno() if stream is not None else 1)


Item = TypeVar("Item")


class _Screen:
    """Stdout as a file for rich, which writes as `say` does."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    def write(self, text: str) -> None:
        _print(sys.stdout, text, "")


class Progress:
    """Shows how far tasks are, on a terminal, and lines between them; silent unless `active`."""

    def __init__(self, active: bool = True):
        self.active = active
        self.bar: Any = None
        if active and sys.stdout is not None and sys.stdout.isatty():
            from rich import console, progress

            screen: Any = _Screen()
            text, left = progress.TextColumn("{task.description}"), progress.TimeRemainingColumn()
            columns = text, progress.BarColumn(), progress.MofNCompleteColumn(), left
            shown = console.Console(file=screen)
            self.bar = progress.Progress(*columns, console=shown, transient=True)

    def over(self, items: Iterable[Item], task: str, total: int, done: int = 0) -> Iterator[Item]:
        """Yields the items and counts them; `done` of `total` came before."""
        if self.bar is None:
            yield from items
            return
        number = self.bar.add_task(task, total=total, completed=done)
        self.bar.start()
        try:
            for item in items:
                yield item
                self.bar.advance(number)
        finally:
            self.bar.stop()
            self.bar.remove_task(number)

    def line(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        elif self.active:
            say(text)

    def close(self) -> None:
        """Removes the bar of a task that has ended with an error."""
        if self.bar is not None:
            self.bar.stop()


def clock_time(seconds: float) -> str:
    """Returns h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


# --- files --------------------------------------------------------------------------------------

TEMPORARIES = ".*.tmp"
SYNC_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # from some network file systems


@contextmanager
def replacing(path: Path, keep: int | None = None) -> Iterator[Path]:
    """Yields a temporary path in the same folder, which then replaces `path` atomically.

    The new file is flushed to disk first. An error removes it and leaves `path` untouched. With
    `keep`, the newest `keep` versions of `path` are kept, see `versions`.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        sync(temporary)
        if keep is not None:
            _rotate(path, keep)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def versions(path: Path) -> list[Path]:
    """Returns `path` and the versions it replaced, newest first: last.pt, last-1.pt, last-2.pt.

    Includes `path` if only older versions exist, which a kill during rotation can cause.
    """
    name = re.compile(rf"{re.escape(path.stem)}-([1-9]\d*){re.escape(path.suffix)}")
    matches = ((name.fullmatch(entry.name), entry) for entry in path.parent.glob(f"{path.stem}-*"))
    older = sorted((int(match[1]), entry) for match, entry in matches if match)
    return [path, *(entry for _, entry in older)] if older or path.exists() else []


def _rotate(path: Path, keep: int) -> None:
    """Renames each version to the next number and removes surplus versions."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in count(1))
    existing = [*takewhile(Path.exists, chain([path], numbered))]  # spares copies after a gap
    for surplus in existing[keep:]:
        surplus.unlink()
    for newer, number in reversed([*zip(existing, range(1, keep), strict=False)]):
        os.replace(newer, path.with_stem(f"{path.stem}-{number}"))


def clear_leftovers(folder: Path) -> None:
    """Removes temporary files left by killed processes."""
    for temporary in folder.glob(TEMPORARIES):
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in SYNC_UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


# --- ranks and hardware -------------------------------------------------------------------------

CORES = "REPRODUCTION_CORES"  # environment variable: cores for this run, if several run at a time
MEETING = "REPRODUCTION_MEETING"  # the file at which ranks meet that a run has started itself
CGROUP = Path("/sys/fs/cgroup")  # of a container, with its quota
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of mallopt(3)


def launched_ranks() -> int | None:
    """Returns the world size under torchrun or our own launcher, None otherwise."""
    is_launched = {"TORCHELASTIC_RUN_ID", MEETING} & os.environ.keys()
    return int(os.environ["WORLD_SIZE"]) if is_launched and "WORLD_SIZE" in os.environ else None


def local_ranks() -> int | None:
    """Returns the number of ranks on this machine, None if not launched."""
    ranks = launched_ranks()
    return None if ranks is None else int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def is_first_rank() -> bool:
    """Whether this process prints and writes files for all ranks."""
    return launched_ranks() is None or os.environ.get("RANK", "0") == "0"


def restarts() -> int:
    """Returns how often torchrun has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def usable_cores() -> int:
    """Returns the number of cores of this process: the machine's, its affinity's or its quota's."""
    has_affinity = hasattr(os, "sched_getaffinity")  # missing on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # the other version of cgroups, or `max`
            quota, period = map(int, " ".join((CGROUP / x).read_text() for x in names).split())
            if quota > 0:  # -1: none
                return max(1, min(cores, math.ceil(quota / period)))
    return cores


def hardware_name(device: str) -> str:
    """Returns the name of the GPU, or of the processor with its number of usable cores.

    `device` is `auto`, `cpu` or `cuda`; without a GPU all of them mean the processor.
    """
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
    cores, names = usable_cores(), [platform.processor() or platform.machine()]
    with suppress(OSError):  # Linux only
        info = Path("/proc/cpuinfo").read_text()
        names = [*re.findall(r"^model name\s*: (.+)", info, re.MULTILINE), *names]
    return f"{' '.join(names[0].split())} ({cores} core{'s' if cores > 1 else ''})"


def keep_freed_memory() -> None:
    """Makes glibc reuse freed memory instead of returning it to the kernel.

    By default, large tensors are returned and every step pays for new, zeroed pages.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(TRIM_THRESHOLD, -1)  # never
        mallopt(MMAP_MAX, 0)


def give_back_freed_memory() -> None:
    """Returns freed memory to the kernel once, before forks that would hold a copy of it."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
