"""One process at a time trains a run."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from reproduction.runs.folder import LOCK, RunFolder
from reproduction.system.errors import RunLocked, UserError
from reproduction.system.ranks import is_first_rank, launcher, restarts

PATIENCE = 0.5  # seconds: others may look at a lock, or a process may be about to end
PATIENCE_OF_RESTARTED = 60.0  # the first rank before this one may be about to be killed
ATTEMPTS = 50  # to open a lock whose folder others take away, or the file system never makes


@contextmanager
def hold(folder: RunFolder) -> Iterator[None]:
    """Keeps the run to this process, its first rank speaking for all; RunLocked if another has it.

    The lock is the process's own (POSIX): workers that it forks have no share in it, and the system
    frees it however the process ends. A folder in which no run begins is taken away again.
    """
    if not is_first_rank():
        yield
        return
    file = _lock(folder)
    try:
        _sign(file)
        yield
    finally:
        if not folder.config_path.exists():
            Path(file.name).unlink(missing_ok=True)
            with suppress(OSError):  # it held something before
                folder.path.rmdir()
        file.close()


def is_held(folder: RunFolder) -> bool:
    """Whether another process trains this run; not to be asked by the one that holds it."""
    try:
        with (folder.path / LOCK).open() as file:
            return not _try_lock(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _lock(folder: RunFolder) -> IO[str]:
    """The locked file, which is the one that others find too."""
    path = folder.path / LOCK
    patience = PATIENCE_OF_RESTARTED if restarts()[0] > 0 else PATIENCE
    deadline = time.monotonic() + patience
    while True:
        file = _open(path)
        if _try_lock(file, fcntl.LOCK_EX):
            with suppress(FileNotFoundError):
                if _is_current(file, path):
                    return file
            file.close()
            continue
        file.seek(0)
        holder = file.readline().strip() or "another process"
        file.close()
        if time.monotonic() > deadline:
            raise RunLocked(f"name={folder.path.name}: {holder} is training {folder.path}")
        time.sleep(0.02)


def _open(path: Path) -> IO[str]:
    """The lock's file, made if need be, again while other processes take its folder away."""
    for _ in range(ATTEMPTS):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("a+")
        except (FileNotFoundError, FileExistsError):
            if os.path.lexists(path.parent) and not path.parent.is_dir():
                raise
            time.sleep(0.01)
        except OSError as error:
            raise UserError(f"{path.parent}: cannot be written to ({error.strerror})") from error
    raise UserError(f"{path.parent}: there cannot be a folder at this place")  # such as /proc


def _sign(file: IO[str]) -> None:
    """Writes a line that tells who holds the lock, and one by which `launcher` finds its own."""
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n{launcher()}\n")
    file.flush()


def _is_current(file: IO[str], path: Path) -> bool:
    """Whether the path still leads to this file; FileNotFoundError if to none."""
    return os.path.samestat(os.fstat(file.fileno()), path.stat())


def _try_lock(file: IO[str], kind: int) -> bool:
    """Whether the file could be locked; UserError where the file system has no locks."""
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        raise UserError(f"{file.name}: cannot be locked ({error.strerror})") from error
    return True
