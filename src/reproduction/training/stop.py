"""How a run stops: by a signal, after a step and on all ranks alike; by an error, in one line."""

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

from reproduction.config import Config
from reproduction.system import (
    STOP_SIGNALS,
    OneLineError,
    PlainError,
    RankFailed,
    Stopped,
    first_line,
    warn,
)

Batch = TypeVar("Batch")

ADVICE = "try a lower recipe.lr, a recipe.clip_grad_norm or recipe.precision=float32"
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE}
LOST = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM}  # of the run's folder


@contextmanager
def handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Sets `handler` for STOP_SIGNALS that are not ignored; restores the old handlers at exit."""
    handled = [s for s in STOP_SIGNALS if signal.getsignal(s) not in (signal.SIG_IGN, None)]
    if threading.current_thread() is not threading.main_thread():
        handled = []
    old = [signal.signal(signum, handler) for signum in handled]
    try:
        yield
    finally:
        for signum, before in zip(handled, old, strict=True):
            signal.signal(signum, before)


def stop_at_once(signum: int, frame: FrameType | None) -> None:
    """Signal handler while no step is running."""
    raise Stopped(signum)


class Stop:
    """Signals to this rank, and what all ranks do alike after a step: go on, save, or stop."""

    def __init__(self, ranks: int):
        self.signum, self.is_waiting, self.is_alone = 0, False, ranks == 1
        self.group: Any = None if self.is_alone else dist.new_group(backend="gloo")

    def request(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler: asks for a stop after this step.

        A single process stops at once while it waits for images, and ends at a second Ctrl-C.
        """
        if self.is_alone and self.signum and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signum = self.signum or signum
        if self.is_waiting:
            raise Stopped(self.signum)

    def while_waiting(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the batches; a signal to a single process ends the wait for one by Stopped."""
        self.is_waiting = self.is_alone
        try:
            for batch in batches:
                self.is_waiting = False
                yield batch
                self.is_waiting = self.is_alone
                if self.is_waiting and self.signum:  # it came since the last step
                    raise Stopped(self.signum)
        finally:
            self.is_waiting = False

    def agreed(self, is_late: bool) -> bool:
        """Whether all ranks save now, as one is late; Stopped if one of them has a signal.

        All ranks call it after each step.
        """
        flags = torch.tensor([self.signum, is_late])
        if not self.is_alone:
            dist.all_reduce(flags, dist.ReduceOp.MAX, self.group)
        signum, is_late_anywhere = flags.tolist()
        if signum:
            raise Stopped(signum)
        return bool(is_late_anywhere)


def ending(error: Exception, config: Config) -> OneLineError:
    """The error of one line that ends this rank; the traceback of a bug is printed."""
    if isinstance(error, OneLineError):
        return error
    step = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))  # by `run.train`
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, dist.DistError) or "gloo/transport" in str(cause):
            return RankFailed(f"{step}another rank is gone ({first_line(cause)})")
        if line := next(lines_of(cause, config), None):
            return PlainError(f"{step}{line}")
        cause = cause.__cause__ or cause.__context__
    warn("".join(traceback.format_exception(error)))
    line = f"{type(error).__name__}: {str(error).strip()}"
    if "Original Traceback" in line:  # of a loader's worker
        line = line.splitlines()[-1]
    return PlainError(f"{step}{line}")


def lines_of(error: BaseException, config: Config) -> Iterator[str]:
    """The one table: what to say of an error that a run may meet; nothing of another one."""
    text, recipe = str(error).strip(), config.recipe
    is_gpu = isinstance(error, torch.OutOfMemoryError)
    if is_gpu or isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate" in text:
        yield (
            f"out of {'the GPU' if is_gpu else 'this machine'}'s memory: lower recipe.batch_size="
            f"{recipe.batch_size}, raise recipe.grad_accum_steps={recipe.grad_accum_steps} or "
            "choose recipe.precision=bf16"
        )
    if isinstance(error, FloatingPointError):  # of the method
        yield f"{text}; {ADVICE}"
    if isinstance(error, OSError) and error.errno is not None:
        name, reason = error.filename, os.strerror(error.errno)
        is_ours = name and Path(config.output_root, config.name or "") in Path(name).parents
        if error.errno in DISK or (is_ours and error.errno in LOST):
            yield f"{name}: {reason}" if name else reason
    if "DataLoader worker (pid" in text:
        yield (
            f"{text.rstrip('. ')}: memory may have run out, try a lower dataset.workers "
            "or recipe.batch_size"
        )
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        yield (
            f"compile={str(config.compile).lower()}: torch cannot compile {config.model.name} as "
            f"one graph ({first_line(error)}); allowed is false"
        )
