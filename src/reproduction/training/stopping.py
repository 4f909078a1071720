"""Signals that end a run: after its step while it trains, so that it goes on exactly there."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from reproduction.errors import STOP_SIGNALS, Stopped
from reproduction.training.distributed import World

Handler = Callable[[int, FrameType | None], None]


class Stop:
    """The signal that this rank got, and the one for which all ranks stop; 0: none."""

    def __init__(self, world: World):
        self.asked = self.agreed = 0
        self.is_alone = world.size == 1
        self.group: Any = None if self.is_alone else dist.new_group(backend="gloo")
        self.pending: tuple[torch.Tensor, dist.Work] | None = None

    def ask(self, signum: int, frame: FrameType | None) -> None:
        """Takes a signal. A second Ctrl-C does not wait for the end of a step."""
        if self.is_alone and self.asked and signum == signal.SIGINT:
            raise Stopped(signum)
        self.asked = self.asked or signum

    def is_due(self) -> bool:
        """Whether to stop now; every rank asks after each step, and all get the same answer.

        A rank's signal reaches the others a step later, so that none has to wait for it.
        """
        if self.is_alone:
            self.agreed = self.asked
        elif not self.agreed:
            if self.pending is not None:
                self.pending[1].wait()
                self.agreed = int(self.pending[0])
            signum = torch.tensor(self.asked)
            work = dist.all_reduce(signum, dist.ReduceOp.MAX, self.group, async_op=True)
            assert work is not None
            self.pending = signum, work
        return self.agreed != 0


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
