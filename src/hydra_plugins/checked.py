"""Hydra's plugins of this project: two sweepers, whose runs any launcher trains.

Hydra finds them here, and executes this file for it: nothing else imports it.
"""

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus

from reproduction.compose import Point, command_of
from reproduction.config import Command, StudyWords, validated
from reproduction.errors import OneLineError, PlainError, first_line, say
from reproduction.jobs import in_processes
from reproduction.sweep import Sweep


class PointSweeper(BasicSweeper):
    """Every value by every other, as Hydra's own sweeper; ends with a table.

    All points are checked before the first one starts, or listed.
    """

    def __init__(self, params: dict[str, str] | None = None):
        super().__init__(max_batch_size=None, params=params)

    def sweep(self, arguments: list[str]) -> Any:
        assert self.config is not None
        HydraConfig.instance().set_config(self.config)  # of which points are composed
        command = command_of(self.config)
        sweep = self.sweep_of(arguments)
        if command.dry_run:
            say(sweep.listing())
            return
        sweep = sweep.only(command.task)
        sweep.check()
        try:
            errors = [*filter(None, self.errors_of(sweep.points, command))]
        except KeyboardInterrupt as interrupt:
            errors = [sweep.interrupted_by(interrupt)]
        sweep.conclude(errors)

    def errors_of(self, points: Sequence[Point], command: Command) -> list[OneLineError | None]:
        """Trains points by `jobs` processes, or by the launcher; returns the error of each."""
        assert self.launcher is not None  # of a sweep
        if command.jobs is not None:
            return [*in_processes(points, command.jobs)]
        words = [point.words for point in points]
        return [*map(error_of, self.launcher.launch(words, command.task or 0))]

    def sweep_of(self, arguments: list[str]) -> Sweep:
        return Sweep.over_keys([*self._parse_config(), *arguments])


class StudySweeper(PointSweeper):
    """The runs of a study, seed by seed, with `arguments` as overrides of all of them."""

    def __init__(self, **words: Any):
        super().__init__()
        self.words = words

    def sweep_of(self, arguments: list[str]) -> Sweep:
        return Sweep.of_study(validated(StudyWords, self.words), arguments)


def error_of(end: JobReturn) -> OneLineError | None:
    """Returns the error of a job; None of one that has not failed."""
    if end.status != JobStatus.FAILED:
        return None
    error = end._return_value  # Hydra's property would raise it
    return error if isinstance(error, OneLineError) else PlainError(first_line(error))
