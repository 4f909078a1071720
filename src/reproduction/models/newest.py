"""The newest of a run's checkpoints that can be read."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reproduction.errors import UserError
from reproduction.models.weights import read_file
from reproduction.ranks import is_first_rank
from reproduction.stdout import warn

PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EACCES, errno.EPERM}

Newest = tuple[Path, Any]
Check = Callable[[Path, Any], None]


def read_newest(key: str, paths: list[Path], check: Check = lambda path, content: None) -> Newest:
    """The first of a run's checkpoints that is readable, and what it holds.

    `check` raises UserError for what is no use either. Says on stderr what could not be read;
    UserError if that is all of them.
    """
    refused: list[UserError] = []
    for path in paths:
        try:
            content = read_file(f"{key}={path}", path)
            check(path, content)
        except UserError as error:
            if _will_pass(error.__cause__):
                raise
            refused.append(error)
            continue
        for reason in refused if is_first_rank() else []:
            warn(f"warning: {reason}; going back to {path.name}")
        return path, content
    others = "".join(f", nor is {path.name} of use" for path in paths[1:])
    raise UserError(f"{refused[0]}{others}")


def _will_pass(cause: BaseException | None) -> bool:
    """Whether a file could not be read now, but may be whole."""
    return isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno in PASSING)
