"""When a run stops for a signal, and when it is saved: after a step, the same on all ranks."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from reproduction.config.schema import Checkpoint
from reproduction.system.errors import STOP_SIGNALS, Stopped
from reproduction.training.distributed import World

Handler = Callable[[int, FrameType | None], None]


class Agreement:
    """What all ranks do after a step: stop for the signal `to_stop` (0: none), write a checkpoint.

    Any rank may ask to stop; the first one's clock tells when to save.
    """

    def __init__(self, world: World, settings: Checkpoint):
        self.asked = self.to_stop = 0
        self.to_save = False
        self.settings = settings
        self.is_main, self.is_alone = world.is_main, world.size == 1
        self.note_saved()
        self.group: Any = None if self.is_alone else dist.new_group(backend="gloo")
        self.pending: tuple[torch.Tensor, dist.Work] | None = None

    def ask(self, signum: int, frame: FrameType | None) -> None:
        """Takes a signal. A second Ctrl-C does not wait for the end of a step."""
        if self.is_alone and self.asked and signum == signal.SIGINT:
            raise Stopped(signum)
        self.asked = self.asked or signum

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
        return [self.asked, int(is_late and self.is_main)]

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
