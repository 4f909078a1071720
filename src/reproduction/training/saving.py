"""When to write a checkpoint, by the clock of a rank."""

import time
from collections.abc import Callable

from reproduction.config import Checkpoint

SHARE = 0.05  # of the time since the last checkpoint, which one at the end of an epoch may take


class Saver:
    """Writes checkpoints, and knows when the last one was written and how long that took."""

    def __init__(self, settings: Checkpoint):
        self.settings = settings
        self.began = self.asked = time.monotonic()
        self.seconds = 0.0  # that the last one took

    def is_late(self) -> bool:
        """Whether `every_minutes` have passed since the last checkpoint, or the last yes."""
        minutes = self.settings.every_minutes
        if minutes is None or time.monotonic() - self.asked < 60 * minutes:
            return False
        self.asked = time.monotonic()
        return True

    def is_due(self, epoch: int) -> bool:
        """Whether to save at the end of an epoch: every `every_epochs`, or if it costs little."""
        if self.settings.every_epochs is not None:
            return epoch % self.settings.every_epochs == 0
        return self.seconds <= SHARE * (time.monotonic() - self.began)

    def write(self, write: Callable[[], None]) -> None:
        self.began = time.monotonic()
        write()
        self.asked = time.monotonic()
        self.seconds = self.asked - self.began
