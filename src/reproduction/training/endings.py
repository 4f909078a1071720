"""How a run ends that does not finish: its one line, and what its folder tells of it."""

import errno
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from reproduction.config.schema import Recipe
from reproduction.data.images import NO_IMAGE
from reproduction.data.loaders import worker_death
from reproduction.runs.folder import RunFolder
from reproduction.system.errors import PlainError, RankFailed, UserError
from reproduction.system.ranks import is_first_rank, restarts
from reproduction.system.stdout import warn

OF_DISKS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE}
OF_PATHS = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM}  # plain in the run's folder
OF_LIBRARIES = re.compile(r"\(os error (\d+)\)")  # as safetensors says it
HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"


def leave_failed(folder: RunFolder, error: Exception) -> str:
    """Writes that a run has failed and says by what; prints the traceback of what is not plain.

    Where torchrun starts the ranks again the run goes on, and nothing is written.
    """
    reason = str(error)
    if not isinstance(error, PlainError):
        warn(traceback.format_exc())
        reason = _reason(error)
    elif not (is_first_rank() or isinstance(error, RankFailed)):
        warn(f"rank {os.environ['RANK']}: {reason}")  # which the first rank does not know
    done, allowed = restarts()
    if done < allowed:
        return f"{reason}; all ranks start again"
    return leave(folder, "failed", reason)


def leave(folder: RunFolder, status: str, reason: str) -> str:
    """Writes how a run ended, if it had begun, and says how to go on; raises nothing."""
    if not folder.config_path.exists():
        return reason
    kept = f"{folder.path} is kept as {status}"
    if is_first_rank():
        try:
            folder.write_summary(status=status, error=reason)
        except (OSError, UserError):  # the disk is full, say: reports know it by its lock
            kept = f"{folder.path} is kept as it is"
    return f"{reason}; {kept}, repeat the command with resume=auto to go on"


@contextmanager
def explaining_memory(what: str, recipe: Recipe) -> Iterator[None]:
    """Turns a lack of memory into a PlainError that names what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_gpu = isinstance(error, torch.OutOfMemoryError)
        if not (is_gpu or isinstance(error, MemoryError) or HOST_MEMORY in str(error)):
            raise
        place = "the GPU's memory" if is_gpu else "this machine's memory"
        raise PlainError(
            f"{what} does not fit into {place}: lower recipe.batch_size={recipe.batch_size}, raise "
            f"recipe.grad_accum_steps={recipe.grad_accum_steps} or choose recipe.precision=bf16"
        ) from error


@contextmanager
def explaining_data() -> Iterator[None]:
    """Turns a broken image, or the death of a loader's worker, into a PlainError."""
    try:
        yield
    except RuntimeError as error:
        last = str(error).strip().rpartition("\n")[2]  # of a worker's traceback
        if NO_IMAGE in last:
            raise PlainError(last.removeprefix("RuntimeError: ")) from error
        if death := worker_death(" ".join(str(error).split())):
            raise PlainError(death) from error
        raise


@contextmanager
def explaining_disk(folder: RunFolder) -> Iterator[None]:
    """Turns what a disk or a lost run folder causes into a PlainError that names the path."""
    try:
        yield
    except (PlainError, UserError):
        raise
    except Exception as error:
        if reason := _reason_of_disk(folder, error):
            raise PlainError(reason) from error
        raise


def _reason_of_disk(folder: RunFolder, error: BaseException) -> str | None:
    """Path and reason, of the error or of one that caused it; None if no disk did."""
    cause: BaseException | None = error
    while cause is not None:
        if (number := _number_of(cause)) is not None:
            where = Path(getattr(cause, "filename", None) or folder.path)
            if number in OF_DISKS or (number in OF_PATHS and folder.path in where.parents):
                return f"{where}: {os.strerror(number)}"
        cause = cause.__cause__ or cause.__context__
    return None


def _number_of(error: BaseException) -> int | None:
    """Of the operating system's error that this is, or that a library tells in words."""
    if isinstance(error, OSError):
        return error.errno
    found = OF_LIBRARIES.search(str(error))
    return int(found[1]) if found else None


def _reason(error: Exception) -> str:
    """What went wrong, in one line; of a loader's worker its own words."""
    text = str(error).strip()
    if "Original Traceback" in text:
        return text.splitlines()[-1]
    return f"{type(error).__name__}: {' '.join(text.split())}"
