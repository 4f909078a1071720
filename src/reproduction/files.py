"""Files that are the old one or the new one, whatever happens."""

import errno
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
