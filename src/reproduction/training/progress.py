"""What a person sees while a run trains: a bar on a terminal, plain lines elsewhere."""

import sys

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from reproduction.stdout import say


class ProgressDisplay:
    """Shows batches within the run and one line per epoch; silent on ranks but the first."""

    def __init__(self, total_steps: int, done_steps: int, active: bool):
        self.active = active
        self.bar: Progress | None = None
        if active and sys.stdout is not None and sys.stdout.isatty():
            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self.task = self.bar.add_task("training", total=total_steps, completed=done_steps)
            self.bar.start()

    def advance(self) -> None:
        if self.bar is not None:
            self.bar.advance(self.task)

    def line(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        elif self.active:
            say(text)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
