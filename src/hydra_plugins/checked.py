"""Hydra's plugins of this project: a launcher that checks all points first, and two sweepers.

Hydra finds them here, and executes this file for it: nothing else imports it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig

from reproduction.check import check
from reproduction.config import StudyWords, validated
from reproduction.launch import Notes, check_choice, objective, run_all
from reproduction.points import Point, command_of, expand, point
from reproduction.system import Interrupted, UserError, say
from reproduction.words import key_of


class CheckedLauncher(Launcher):
    """Checks all points before the first one starts; trains them here, or `jobs` at a time."""

    def setup(self, *, hydra_context: Any, task_function: Any, config: DictConfig) -> None:
        # task_function, the main of train.py, is not called: run_all trains the points
        self.config = config
        HydraConfig.instance().set_config(config)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> list[JobReturn]:
        own = self.config.hydra
        command = command_of(self.config)
        # sweepers of ours have listed their points instead of coming here
        command.refuse("dry_run", reason=f"{own.sweeper._target_} lists no points beforehand")
        first = initial_job_idx
        points = [point(words) for words in job_overrides]
        if command.task is not None:
            if command.task >= len(points):
                raise UserError(f"task={command.task}: must be 0 to {len(points) - 1}")
            first += command.task
            points = [points[command.task]]
        check_choice(points, own.sweeper._target_)
        errors = run_all(points, command.jobs)
        notes = Notes(Path(own.sweep.dir))
        returns = []
        for number, (planned, error) in enumerate(zip(points, errors, strict=True), first):
            notes.add(number, planned)
            end = JobReturn(planned.words, status=JobStatus.COMPLETED)
            end.return_value = error or objective(planned, command.objective)
            if error is not None:
                notes.add_error(number, error)
                end.status = JobStatus.FAILED
            returns.append(end)
        return returns


class PointSweeper(BasicSweeper):
    """Every value by every other, as Hydra's own sweeper, for any launcher.

    All points are checked before the first one starts, or listed.
    """

    def sweep(self, arguments: list[str]) -> Any:
        assert self.config is not None and self.launcher is not None
        HydraConfig.instance().set_config(self.config)
        own = self.config.hydra
        command = command_of(self.config)
        points = self.points(arguments)
        if command.dry_run:
            from reproduction.studies.conclude import listing  # imports pandas

            say(listing(points))
            return []
        target = own.launcher._target_
        if not target.startswith(__name__):
            command.refuse("jobs", "task", reason=f"is for hydra/launcher=checked, not {target}")
            check(points)
        # EndOfSweep needs the rows of each point; the launcher gets its words alone, without rows
        notes = Notes(Path(own.sweep.dir))
        for number, planned in enumerate(points):
            notes.add(number, planned)
        try:
            return [self.launcher.launch([list(planned.words) for planned in points], 0)]
        except KeyboardInterrupt as interrupt:  # Hydra would end without EndOfSweep
            line = f"interrupted; {points[0].config.how_to_continue}"
            notes.add_error(len(points), Interrupted(str(interrupt) or line))
            return []
        except BaseException:
            notes.take()
            raise

    def points(self, arguments: list[str]) -> list[Point]:
        return [point(words) for words in expand([*self._parse_config(), *arguments])]


class StudySweeper(PointSweeper):
    """The runs of a study, seed by seed, with `arguments` as overrides of all of them."""

    def __init__(self, **words: Any):
        super().__init__(max_batch_size=None)
        self.words = words

    def points(self, arguments: list[str]) -> list[Point]:
        from reproduction.studies.study import plan, studies

        for word in arguments:
            if key_of(word) == "seed":
                raise UserError(f"{word}: must be seeds=N, from the study's first_seed on")
        own = validated(StudyWords, self.words)
        return plan(studies(own.study), own.seeds, own.scale, arguments)
