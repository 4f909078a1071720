"""A lock that allows one process at a time to train a run."""

import fcntl
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from filelock import AcquireReturnProxy, FileLock, Timeout

from reproduction.runs.folder import LOCK, RunFolder
from reproduction.system.errors import RunLocked, UserError
from reproduction.system.ranks import is_first_rank, restarts

PATIENCE = 0.5  # seconds: a reader may hold the lock briefly, or its owner may be exiting
PATIENCE_OF_RESTARTED = 60.0  # the previous first rank may still be shutting down
Status = Literal["finished", "running", "interrupted", "failed", "not started"]


@contextmanager
def hold(folder: RunFolder) -> Iterator[None]:
    """Locks the run for this process, on the first rank only. Raises RunLocked if it is taken.

    The system frees the lock when the process ends: forked workers do not keep it.
    """
    if not is_first_rank():
        yield
        return
    path = folder.path / LOCK
    with _lock(path):
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")  # for RunLocked
        yield


def is_held(folder: RunFolder) -> bool:
    """Whether another process trains this run. The lock's owner must not call this."""
    try:
        with (folder.path / LOCK).open() as file:  # may be another user's
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        raise _cannot_lock(folder.path / LOCK, error) from error
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


def _lock(path: Path) -> AcquireReturnProxy[FileLock]:
    """Locks the file, in a new folder if need be; the context that is returned frees it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, poll_interval=0.02, fallback_to_soft=False)
        return lock.acquire(PATIENCE_OF_RESTARTED if restarts()[0] > 0 else PATIENCE)
    except Timeout:
        holder = path.read_text().strip() or "another process"
        raise RunLocked(f"name={path.parent.name}: {holder} is training {path.parent}") from None
    except OSError as error:
        raise _cannot_lock(path, error) from error


def _cannot_lock(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be locked ({error.strerror})")
