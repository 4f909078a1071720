"""Files that are the old one or the new one, whatever happens; and errors that name theirs."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What a machine may lack or lose, and no override or file of a user is to blame for.
LACKS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
}


def lack_behind(error: BaseException, outside: BaseException | None = None) -> OSError | None:
    """Returns the error of LACKS that has led to another one, which may hide it.

    Not that of `outside`, which was handled before.
    """
    cause: BaseException | None = error
    while cause is not None and cause is not outside:
        if isinstance(cause, OSError) and cause.errno in LACKS:
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Lets an error of the system name `path`, also if a library has made another one of it."""
    outside = sys.exception()
    try:
        yield
    except Exception as error:
        system = lack_behind(error, outside) or error
        if not isinstance(system, OSError) or system.errno is None:
            raise
        raise OSError(system.errno, os.strerror(system.errno), str(path)) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder, which then replaces `path`, unless it fails.

    What a killed process leaves is overwritten by the next one.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with naming(path):
        try:
            yield temporary
            flush(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def cut(name: str, longest: int, tail: str = "") -> str:
    """Returns as much of a name as fits into so many bytes, with its tail."""
    room = longest - len(os.fsencode(tail))
    return os.fsencode(name)[:room].decode(errors="ignore") + tail


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def flush(path: Path) -> None:
    """Waits until a file is on the disk."""
    with path.open() as file:
        os.fsync(file.fileno())
