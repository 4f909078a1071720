"""Whether to save the end of an epoch."""

import time
from collections.abc import Callable

SHARE = 0.05  # of the time since the last checkpoint, which one at the end of an epoch may take


class Saver:
    """Writes checkpoints and knows how long the last one took."""

    def __init__(self, every_epochs: int | None):
        self.every_epochs = every_epochs
        self.began, self.seconds = time.monotonic(), 0.0  # of the last checkpoint

    def is_due(self, epoch: int) -> bool:
        """Whether to save at the end of an epoch: every `every_epochs`, or if it costs little."""
        if self.every_epochs is not None:
            return epoch % self.every_epochs == 0
        return self.seconds <= SHARE * (time.monotonic() - self.began)

    def write(self, write: Callable[[], None]) -> None:
        self.began = time.monotonic()
        write()
        self.seconds = time.monotonic() - self.began
