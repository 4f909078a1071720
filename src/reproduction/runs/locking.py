"""A lock that allows one process at a time to train a run."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

from reproduction.runs.folder import LOCK, RunFolder
from reproduction.system.errors import RunLocked, UserError
from reproduction.system.ranks import is_first_rank, launcher, restarts

PATIENCE = 0.5  # seconds: a reader may hold the lock briefly, or its owner may be exiting
PATIENCE_OF_RESTARTED = 60.0  # the previous first rank may still be shutting down
Status = Literal["finished", "running", "interrupted", "failed", "not started"]
ATTEMPTS = 50  # to open a lock while other processes remove its folder


@contextmanager
def hold(folder: RunFolder) -> Iterator[None]:
    """Locks the run for this process, on the first rank only. Raises RunLocked if it is taken.

    POSIX locks belong to the process: forked workers do not inherit them, and the system releases
    them when the process ends. The folder is removed again if no run starts in it.
    """
    if not is_first_rank():
        yield
        return
    file = _lock(folder)
    try:
        _write_owner(file)
        yield
    finally:
        if not folder.config_path.exists():
            Path(file.name).unlink(missing_ok=True)
            with suppress(OSError):  # not empty
                folder.path.rmdir()
        file.close()


def is_held(folder: RunFolder) -> bool:
    """Whether another process trains this run. The lock's owner must not call this."""
    try:
        with (folder.path / LOCK).open() as file:
            return not try_lock(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def status_of(folder: RunFolder, summary: Mapping[str, Any]) -> Status:
    """Returns the status of a run. A killed one, whose summary says `running`, is interrupted.

    The lock's owner must not call this.
    """
    status = summary.get("status")
    if status == "finished":
        return "finished"
    if is_held(folder):
        return "running"
    if status == "failed":
        return "failed"
    return "interrupted" if folder.config_path.exists() else "not started"


def _lock(folder: RunFolder) -> IO[str]:
    """Returns the locked file, once the path still leads to it."""
    path = folder.path / LOCK
    patience = PATIENCE_OF_RESTARTED if restarts()[0] > 0 else PATIENCE
    deadline = time.monotonic() + patience
    while True:
        file = _open(path)
        if try_lock(file, fcntl.LOCK_EX):
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
    """Opens or creates the lock file, retrying while other processes remove its folder."""
    for _ in range(ATTEMPTS):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("a+")
        except (FileNotFoundError, FileExistsError):
            if os.path.lexists(path.parent) and not path.parent.is_dir():
                raise
            time.sleep(0.01)
        except OSError as error:
            raise UserError(f"{path.parent}: is not writable ({error.strerror})") from error
    raise UserError(f"{path.parent}: a folder cannot be created here")  # such as in /proc


def _write_owner(file: IO[str]) -> None:
    """Writes the owner for error messages, and the launcher for restarted ranks."""
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n{launcher()}\n")
    file.flush()


def _is_current(file: IO[str], path: Path) -> bool:
    """Whether the path still leads to this file. Raises FileNotFoundError if it is gone."""
    return os.path.samestat(os.fstat(file.fileno()), path.stat())


def try_lock(file: IO[str], kind: int) -> bool:
    """Whether the file could be locked. Raises UserError if the file system has no locks."""
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        raise UserError(f"{file.name}: cannot be locked ({error.strerror})") from error
    return True
