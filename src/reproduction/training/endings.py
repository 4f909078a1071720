"""How a run ends that does not finish: by a failure, in one line, or after a step, by a signal.

All ranks stop, and save, after the same step.
"""

import errno
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from reproduction.config import Checkpoint, Recipe
from reproduction.data.images import NO_IMAGE, SKIPPING
from reproduction.runs.folder import RunFolder
from reproduction.system.errors import STOP_SIGNALS, PlainError, RankFailed, Stopped, UserError
from reproduction.system.ranks import is_first_rank, restarts
from reproduction.system.terminal import warn
from reproduction.training.distributed import World

OF_DISKS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE}
OF_PATHS = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM}  # plain in the run's folder
SECONDS_AFTER_A_DEATH = 10  # of a rank, in which the others may still end by themselves
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
            told = last.removeprefix("RuntimeError: ")
            raise PlainError(f"{told}; {SKIPPING}") from error
        said = " ".join(str(error).split())
        if "DataLoader worker (pid" in said:
            raise PlainError(
                f"{said.rstrip('. ')}: memory may have run out, try a lower dataset.workers, "
                "dataset.memory_mib or recipe.batch_size"
            ) from error
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
        if isinstance(cause, OSError) and (number := cause.errno) is not None:
            where = Path(cause.filename or folder.path)
            if number in OF_DISKS or (number in OF_PATHS and folder.path in where.parents):
                return f"{where}: {os.strerror(number)}"
        cause = cause.__cause__ or cause.__context__
    return None


def _reason(error: Exception) -> str:
    """What went wrong, in one line; of a loader's worker its own words."""
    text = str(error).strip()
    if "Original Traceback" in text:
        return text.splitlines()[-1]
    return f"{type(error).__name__}: {' '.join(text.split())}"


Handler = Callable[[int, FrameType | None], None]


class Agreement:
    """What all ranks do after a step: stop for the signal `to_stop` (0: none), write a checkpoint.

    Any rank may ask to stop; the first one's clock tells when to save.
    """

    def __init__(self, world: World, settings: Checkpoint):
        self.asked = self.to_stop = 0
        self.to_save = False
        self.settings = settings
        self.world, self.is_alone = world, world.size == 1
        self.note_saved()
        self.group: Any = None if self.is_alone else dist.new_group(backend="gloo")
        self.pending: tuple[torch.Tensor, dist.Work] | None = None

    def ask(self, signum: int, frame: FrameType | None) -> None:
        """Takes a signal. A second Ctrl-C does not wait for the end of a step.

        Nor does a signal by which the launcher ends what is left after the death of a rank.
        """
        if self.is_alone and self.asked and signum == signal.SIGINT:
            raise Stopped(signum)
        self.asked = self.asked or signum
        if self.world.is_incomplete():
            end = threading.Timer(SECONDS_AFTER_A_DEATH, os.kill, (os.getpid(), signal.SIGKILL))
            end.daemon = True
            end.start()

    def renew(self, step: int) -> None:
        """Every rank calls it after each step, and all come to the same."""
        if self.to_stop:
            return
        self.to_stop, is_late = self._own() if self.is_alone else self._earlier()
        every = self.settings.every_steps
        self.to_save = bool(is_late) or (every is not None and step % every == 0)

    def note_saved(self) -> None:
        """Begins to count the minutes."""
        self.saved_at = time.monotonic()

    def _own(self) -> list[int]:
        """This rank's signal, and whether it is time to save."""
        minutes = self.settings.every_minutes
        is_late = minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes
        return [self.asked, int(is_late and self.world.is_main)]

    def _earlier(self) -> list[int]:
        """The same of all ranks, as it was a step ago, so that none has to wait for another."""
        answer = [0, 0]
        if self.pending is not None:
            self.pending[1].wait()
            answer = self.pending[0].tolist()
        if answer[1]:
            self.note_saved()  # else it would be asked for once more
        told = torch.tensor(self._own())
        work = dist.all_reduce(told, dist.ReduceOp.MAX, self.group, async_op=True)
        assert work is not None
        self.pending = told, work
        return answer


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Gives STOP_SIGNALS to `handler`, in the end back to whom they went; ignored ones stay so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    ours = [signum for signum, old in before.items() if old not in (signal.SIG_IGN, None)]
    for signum in ours:
        signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum in ours:
            signal.signal(signum, before[signum])


def stop_at_once(signum: int, frame: FrameType | None) -> None:
    """The handler where no step is under way."""
    raise Stopped(signum)


def pass_on(signum: int) -> None:
    """Gives a signal that has stopped a run to a handler of the program around it.

    Such as the one of a cluster's launcher, which has the job started again.
    """
    handler = signal.getsignal(signum)
    if callable(handler) and handler is not signal.default_int_handler:
        signal.raise_signal(signum)
