"""How far a task is: a bar on a terminal, elsewhere a line a minute."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from reproduction.system.terminal import Screen, say

Item = TypeVar("Item")
EVERY_SECONDS = 60.0


class Progress:
    """Shows tasks one after the other, and lines between them; silent unless `active`."""

    def __init__(self, active: bool = True):
        self.active = active
        self.bar: Any = None  # of rich, imported here so that a refused command does not
        if active and sys.stdout is not None and sys.stdout.isatty():
            from rich import console, progress

            text, left = progress.TextColumn("{task.description}"), progress.TimeRemainingColumn()
            columns = text, progress.BarColumn(), progress.MofNCompleteColumn(), left
            screen: Any = Screen()
            self.bar = progress.Progress(
                *columns, console=console.Console(file=screen), transient=True
            )

    def over(self, items: Iterable[Item], task: str, total: int, done: int = 0) -> Iterator[Item]:
        """Yields the items and counts them; `done` of `total` came before."""
        bar, start = self.bar, time.monotonic()
        number = None if bar is None else bar.add_task(task, total=total, completed=done)
        told, first = start, done
        if bar is not None:
            bar.start()
        try:
            for item in items:
                yield item
                done, now = done + 1, time.monotonic()
                if bar is not None:
                    bar.advance(number)
                elif self.active and now - told >= EVERY_SECONDS:
                    left = (now - start) / (done - first) * (total - done)
                    say(f"{task}: {done:,} of {total:,}, {clock_time(left)} left")
                    told = now
        finally:
            if bar is not None:
                bar.stop()
                bar.remove_task(number)

    def close(self) -> None:
        """Removes the bar of a task that has ended with an error."""
        if self.bar is not None:
            self.bar.stop()

    def line(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        elif self.active:
            say(text)


def clock_time(seconds: float) -> str:
    """Returns h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
