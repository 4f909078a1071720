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
from reproduction.launch import Sweep, check_choice, going_on, launch_of, objective, run_all
from reproduction.start import Point, expand, point
from reproduction.system import UserError, say
from reproduction.words import key_of


class CheckedLauncher(Launcher):
    """Checks all points before the first one starts; trains them here, or `jobs` at a time."""

    def __init__(self, jobs: int | None, task: int | None, dry_run: bool):
        self.settings = {"jobs": jobs, "task": task, "dry_run": dry_run}

    def setup(self, *, hydra_context: Any, task_function: Any, config: DictConfig) -> None:
        self.config = config
        HydraConfig.instance().set_config(config)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> list[JobReturn]:
        own, launch = self.config.hydra, launch_of(self.config, **self.settings)
        launch.refuse("dry_run", reason=f"{own.sweeper._target_} chooses points as it runs them")
        points = [point(words) for words in job_overrides]
        numbers = range(len(points))
        if launch.task is not None:
            if launch.task not in numbers:
                raise UserError(f"task={launch.task}: must be 0 to {len(points) - 1}")
            numbers = numbers[launch.task : launch.task + 1]
        started = [points[number] for number in numbers]
        check_choice(started, own.sweeper._target_)
        errors = run_all(started, launch.jobs)
        sweep, returns = Sweep(Path(own.sweep.dir)), []
        for number, run, error in zip(numbers, started, errors, strict=True):
            sweep.note(initial_job_idx + number, run, error)
            value = objective(run, launch.objective) if error is None else error
            status = JobStatus.COMPLETED if error is None else JobStatus.FAILED
            returns.append(JobReturn(run.typed, status=status, _return_value=value))
        return returns


class PointSweeper(BasicSweeper):
    """Hydra's basic sweeper, whose points are composed once and can be listed, for any launcher."""

    def sweep(self, arguments: list[str]) -> Any:
        assert self.config is not None and self.launcher is not None
        HydraConfig.instance().set_config(self.config)
        own, launch = self.config.hydra, launch_of(self.config)
        points = self.points(arguments)
        if launch.dry_run:
            from reproduction.studies.conclude import listing  # imports pandas

            say(listing(points))
            return []
        target = own.launcher._target_
        if not target.startswith(__name__):
            launch.refuse("jobs", "task", reason=f"is for hydra/launcher=checked, not {target}")
            check(points)
        words = [point.typed for point in points]
        with Sweep(Path(own.sweep.dir)).planned(points):
            try:
                return [self.launcher.launch(words, 0)]
            except KeyboardInterrupt as interrupt:  # Hydra ends without its callbacks
                from reproduction.studies.conclude import conclude  # imports pandas

                if launch.task is None:
                    conclude(points)
                raise KeyboardInterrupt(going_on(points, str(interrupt))) from interrupt

    def points(self, arguments: list[str]) -> list[Point]:
        """Returns every value by every other."""
        return [point(words) for words in expand([*self._parse_config(), *arguments])]


class StudySweeper(PointSweeper):
    """The runs of a study, seed by seed, with `arguments` as overrides of all of them."""

    def __init__(self, study: str, seeds: Any, scale: str, **settings: Any):
        super().__init__(**settings)
        self.study, self.seeds, self.scale = str(study), seeds, scale

    def points(self, arguments: list[str]) -> list[Point]:
        from reproduction.studies.study import SCALES, plan, studies

        for word in arguments:
            if key_of(word) == "seed":
                raise UserError(f"{word}: must be seeds=N, from the study's first_seed on")
        if self.scale not in SCALES:
            raise UserError(f"scale={self.scale}: must be one of {', '.join(SCALES)}")
        if self.seeds is not None and not (type(self.seeds) is int and self.seeds >= 1):
            raise UserError(f"seeds={self.seeds}: must be an integer >= 1")
        return plan(studies(self.study), self.seeds, self.scale, arguments)
