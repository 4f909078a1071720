"""When to save, and a thread that writes the files while the training goes on."""

import math
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

SHARE = 0.05  # of the time since the last checkpoint, which one at the end of an epoch may take


class Saver:
    """Writes files in a thread, in the order of their submission.

    `check` and `wait` raise the error of a file that could not be written.
    """

    def __init__(self, every_epochs: int | None):
        self.every_epochs = every_epochs
        self.thread = futures.ThreadPoolExecutor(1)
        self.pending: list[futures.Future[Any]] = []
        self.began, self.seconds = time.monotonic(), 0.0  # of the last checkpoint

    def is_due(self, epoch: int) -> bool:
        """Whether to save at the end of an epoch: every `every_epochs`, or if it costs little."""
        if self.every_epochs is not None:
            return epoch % self.every_epochs == 0
        return self.seconds <= SHARE * (time.monotonic() - self.began)

    def submit(self, write: Callable[[], Any]) -> None:
        self.pending.append(self.thread.submit(write))

    def submit_checkpoint(self, write: Callable[[], None]) -> None:
        """Submits a checkpoint, which `is_due` measures, after the earlier files are written."""
        began = time.monotonic()

        def write_and_measure() -> None:
            write()
            self.seconds = time.monotonic() - began

        self.wait()
        self.began, self.seconds = began, math.inf  # until it is written
        self.submit(write_and_measure)

    def check(self) -> None:
        while self.pending and self.pending[0].done():
            self.pending.pop(0).result()

    def wait(self) -> None:
        """Waits until all files are written."""
        while self.pending:
            futures.wait(self.pending[:1])
            self.pending.pop(0).result()

    def close(self) -> None:
        """Waits likewise, without raising errors, and even if a second Ctrl-C arrives."""
        try:
            futures.wait(self.pending)
        except BaseException:  # the lock of the run must outlive the writing
            futures.wait(self.pending)
            raise
        finally:
            self.thread.shutdown()
