"""How a run stops: by a signal, after a step and on all ranks alike; by an error, in one line."""

import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from reproduction.errors import (
    STOP_SIGNALS,
    OneLineError,
    PlainError,
    RankFailed,
    Stopped,
    first_line,
    reason_of,
    warn,
)
from reproduction.files import LACKS

Batch = TypeVar("Batch")


@contextmanager
def handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Sets `handler` for STOP_SIGNALS that are not ignored; restores the old handlers at exit."""
    handled = [s for s in STOP_SIGNALS if signal.getsignal(s) not in (signal.SIG_IGN, None)]
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
        self.signum = 0  # the first one received
        self.is_waiting = False  # for images, while a single process can stop at once
        self.is_alone = ranks == 1
        self.group: Any = None
        if not self.is_alone:
            self.group = dist.new_group(backend="gloo")

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

    def any_rank(self, wish: bool) -> bool:
        """Returns whether any rank has this wish; Stopped if any rank has a signal.

        All ranks call it after each step.
        """
        flags = torch.tensor([self.signum, wish])
        if not self.is_alone:
            dist.all_reduce(flags, dist.ReduceOp.MAX, self.group)
        signum, is_wished = flags.tolist()
        if signum:
            raise Stopped(signum)
        return bool(is_wished)


def ending(error: Exception) -> OneLineError:
    """A new error, of the one line that ends this rank; the traceback of a bug is printed.

    Looks at the error and its causes by `raise ... from`, not at its context. The error is a new
    one: it has no traceback, which would keep the model in memory.
    """
    if isinstance(error, OneLineError):
        return type(error)(error)
    step = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))  # by `run.train`
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, dist.DistError) or "gloo/transport" in str(cause):
            return RankFailed(f"{step}another rank is gone ({first_line(cause)})")
        line = explained(cause)
        if line is not None:
            return PlainError(f"{step}{line}")
        cause = cause.__cause__
    warn("".join(traceback.format_exception(error)))
    line = f"{type(error).__name__}: {str(error).strip()}"
    if "Original Traceback" in line:  # of a loader's worker
        line = line.splitlines()[-1]
    return PlainError(f"{step}{line}")


def explained(error: BaseException) -> str | None:
    """What to say of a lack of memory, or of what else the machine lacks; None of another error."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        advice = "lower recipe.batch_size, or raise recipe.grad_accum_steps"
        return f"{first_line(error)}; {advice}"
    if isinstance(error, OSError) and error.errno in LACKS:
        return reason_of(error)
    return None
