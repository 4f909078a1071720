"""One process at a time trains a run."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from reproduction.errors import RunLocked, UserError
from reproduction.ranks import is_first_rank
from reproduction.runs import LOCK, RunFolder


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
        with (folder.path / LOCK).open("r+") as file:
            return not _try_lock(file)
    except FileNotFoundError:
        return False


def _lock(folder: RunFolder) -> IO[str]:
    """The locked file, which is the one that others find too."""
    path = folder.path / LOCK
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("a+")
        except FileNotFoundError:  # another process has just taken the folder away
            continue
        if not _try_lock(file):
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise RunLocked(f"name={folder.path.name}: {holder} is training {folder.path}")
        with suppress(FileNotFoundError):
            if _is_current(file, path):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}")
                file.flush()
                return file
        file.close()


def _is_current(file: IO[str], path: Path) -> bool:
    """Whether the path still leads to this file; FileNotFoundError if to none."""
    return os.path.samestat(os.fstat(file.fileno()), path.stat())


def _try_lock(file: IO[str]) -> bool:
    """Whether the file could be locked; UserError where the file system has no locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        raise UserError(f"{file.name}: cannot be locked ({error.strerror})") from error
    return True
