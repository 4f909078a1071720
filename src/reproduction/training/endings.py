"""How an unfinished run ends: with one line after a failure, or by a signal after a step.

All ranks stop, and save, after the same step.
"""

import errno
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from reproduction.config import Config, Recipe
from reproduction.data.images import NO_IMAGE
from reproduction.runs.folder import RunFolder
from reproduction.system.errors import (
    STOP_SIGNALS,
    PlainError,
    RankFailed,
    Stopped,
    UserError,
    first_line,
)
from reproduction.system.ranks import is_first_rank, restarts
from reproduction.system.terminal import say, warn
from reproduction.training.distributed import World
from reproduction.training.metrics import non_finite_error

DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE}
PATH_ERRORS = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM}  # only of the run's folder
SECONDS_AFTER_A_DEATH = 10  # time for the other ranks to end by themselves
HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"


def record_failure(config: Config, error: Exception) -> str:
    """Records that a run has failed and returns the line to print.

    Prints the traceback unless it is a PlainError. If torchrun will restart the ranks, records
    nothing.
    """
    reason = str(error)
    if not isinstance(error, PlainError):
        warn(traceback.format_exc())
        reason = _error_line(error)
    elif not (is_first_rank() or isinstance(error, RankFailed)):
        warn(f"rank {os.environ['RANK']}: {reason}")  # the first rank does not know it
    done, allowed = restarts()
    if done < allowed:
        return f"{reason}; all ranks restart"
    return record_end(config, "failed", reason)


def record_end(config: Config, status: str, reason: str) -> str:
    """Records the status of a run that has begun and returns the line to print; never raises."""
    folder = RunFolder.of(config)
    if not folder.config_path.exists():
        return reason
    outcome = f"{folder.path} is kept as {status}"
    if is_first_rank():
        try:
            folder.write_summary(status=status, error=reason)
        except (OSError, UserError):  # such as a full disk; reports recognise the run by its lock
            outcome = f"{folder.path} is kept as it is"
    how = "" if config.resume == "auto" else " with resume=auto"
    return f"{reason}; {outcome}, repeat the command{how} to continue"


@contextmanager
def explaining_memory(task: str, recipe: Recipe) -> Iterator[None]:
    """Turns an out-of-memory error into a PlainError that names the settings to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_gpu = isinstance(error, torch.OutOfMemoryError)
        if not (is_gpu or isinstance(error, MemoryError) or HOST_MEMORY in str(error)):
            raise
        place = "the GPU's memory" if is_gpu else "this machine's memory"
        raise PlainError(
            f"{task} does not fit into {place}: lower recipe.batch_size={recipe.batch_size}, raise "
            f"recipe.grad_accum_steps={recipe.grad_accum_steps} or choose recipe.precision=bf16"
        ) from error


@contextmanager
def explaining_step(step: int, config: Config) -> Iterator[None]:
    """Turns a lack of memory, a gain that is not finite or a compiler's error into PlainError."""
    try:
        with explaining_memory(f"step {step}", config.recipe):
            yield
    except FloatingPointError as error:
        raise non_finite_error(step, str(error)) from error
    except Exception as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        raise PlainError(
            f"compile={str(config.compile).lower()}: torch cannot compile {config.model.name} as "
            f"one graph ({first_line(error)}); allowed is false"
        ) from error


@contextmanager
def explaining_data() -> Iterator[None]:
    """Turns a broken image or a dead worker of the loader into a PlainError."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).strip()
        last_line = text.rpartition("\n")[2]  # the reason, below a worker's traceback
        if NO_IMAGE in last_line:
            raise PlainError(last_line.removeprefix("RuntimeError: ")) from error
        reason = " ".join(text.split())
        if "DataLoader worker (pid" in reason:
            raise PlainError(
                f"{reason.rstrip('. ')}: memory may have run out, try a lower dataset.workers, "
                "dataset.memory_mib or recipe.batch_size"
            ) from error
        raise


@contextmanager
def explaining_disk(folder: RunFolder) -> Iterator[None]:
    """Turns errors of a disk or a lost run folder into a PlainError that names the path."""
    try:
        yield
    except (PlainError, UserError):
        raise
    except Exception as error:
        if reason := _disk_error_line(folder, error):
            raise PlainError(reason) from error
        raise


def _disk_error_line(folder: RunFolder, error: BaseException) -> str | None:
    """`path: reason` of a disk error among the error and its causes; None if there is none.

    The path only if the error has one: the fault may be of any file, such as an image.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and (number := cause.errno) is not None:
            name, reason = cause.filename, os.strerror(number)
            lost = name and number in PATH_ERRORS and folder.path in Path(name).parents
            if lost or number in DISK_ERRORS:
                return f"{name}: {reason}" if name else reason
        cause = cause.__cause__ or cause.__context__
    return None


def _error_line(error: Exception) -> str:
    """The kind and message of an error in one line."""
    text = str(error).strip()
    if "Original Traceback" in text:  # of a loader's worker
        return text.splitlines()[-1]
    return f"{type(error).__name__}: {' '.join(text.split())}"


Batch = TypeVar("Batch")
Handler = Callable[[int, FrameType | None], None]


class Agreement:
    """What all ranks do alike after a step: go on, save, or stop by a signal to any of them.

    Several ranks agree on what they asked for one step ago, so that none waits for another.
    """

    def __init__(self, world: World):
        self.world, self.signum, self.is_waiting = world, 0, False
        self.group: Any = None if world.size == 1 else dist.new_group(backend="gloo")
        self.asked: tuple[torch.Tensor, dist.Work] | None = None  # by all ranks, one step ago

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler that requests a stop after the current step.

        A single process stops at once if it waits for the loader, or at a second Ctrl-C. After the
        death of another rank, the launcher signals the remaining ones: they are killed if they do
        not end in time.
        """
        if self.group is None and self.signum and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signum = self.signum or signum
        self._stop_waiting()
        if self.world.has_lost_neighbour():
            end = threading.Timer(SECONDS_AFTER_A_DEATH, os.kill, (os.getpid(), signal.SIGKILL))
            end.daemon = True
            end.start()

    def to_save(self, is_late: bool) -> bool:
        """Whether all ranks save now, as one of them is late; raises Stopped if one has a signal.

        All ranks have to call it after each step.
        """
        signum, is_late_anywhere = divmod(self._largest(2 * self.signum + is_late), 2)
        if signum:
            raise Stopped(signum)
        return bool(is_late_anywhere)

    def _largest(self, flag: int) -> int:
        """Returns the flag of a single process, or the largest of all ranks' one step ago."""
        if self.group is None:
            return flag
        largest = 0
        if self.asked is not None:
            self.asked[1].wait()
            largest = int(self.asked[0])
        flags = torch.tensor(flag)
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, self.group, async_op=True)
        assert work is not None
        self.asked = flags, work
        return largest

    def waiting_for(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the batches; a signal to a single process ends the wait for one by Stopped."""
        self.is_waiting = self.group is None
        try:
            for batch in batches:
                self.is_waiting = False
                yield batch
                self.is_waiting = self.group is None
                self._stop_waiting()  # the signal came since the last step
        finally:
            self.is_waiting = False

    def _stop_waiting(self) -> None:
        if self.is_waiting and self.signum:
            raise Stopped(self.signum)


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Sets `handler` for STOP_SIGNALS that are not ignored; restores the old handlers at exit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    handled = [s for s, old in old_handlers.items() if old not in (signal.SIG_IGN, None)]
    for signum in handled:
        signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum in handled:
            signal.signal(signum, old_handlers[signum])


@contextmanager
def announcing(text: str) -> Iterator[None]:
    """Prints `text` once if a signal of STOP_SIGNALS comes, even within a call of torch.

    Python's handlers run after the call, which a backward pass may be for half a minute.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)

    def announce() -> None:
        is_said = False
        while came := os.read(reader, 1)[0]:  # other signals, too, such as SIGCHLD
            if came in STOP_SIGNALS and not is_said:
                is_said = True
                say(text)

    thread = threading.Thread(target=announce, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.set_blocking(writer, True)
        os.write(writer, bytes(1))  # to close it is not enough, as forked workers hold it too
        thread.join()
        os.close(writer)
        os.close(reader)


def stop_at_once(signum: int, frame: FrameType | None) -> None:
    """Signal handler while no step is running."""
    raise Stopped(signum)


def forward_signal(signum: int) -> None:
    """Forwards the signal that stopped a run to the handler of the surrounding program.

    For example, the handler of a cluster's launcher requeues the job.
    """
    handler = signal.getsignal(signum)
    if callable(handler) and handler is not signal.default_int_handler:
        signal.raise_signal(signum)
