"""Hydra's plugins of this project: launchers that check all points first, and two sweepers.

Hydra finds them here, and executes this file for it: nothing else imports it.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf

from reproduction.application import Notes
from reproduction.compose import Point, command_of, planned_point
from reproduction.config import StudyWords, validated
from reproduction.errors import OneLineError, PlainError, first_line, say
from reproduction.jobs import in_processes, objective, train_here
from reproduction.submitted import Jobs, SlurmJobs, in_job
from reproduction.sweep import Sweep, check_choice

RAY = "hydra_plugins.hydra_ray_launcher."  # launchers whose jobs run on other machines


def error_of(end: JobReturn) -> OneLineError | None:
    """Returns the error of a job; None of one that has not failed."""
    if end.status != JobStatus.FAILED:
        return None
    error = end._return_value  # Hydra's property would raise it
    if isinstance(error, OneLineError):
        return error
    return PlainError(first_line(error))


class CheckedLauncher(Launcher):
    """Trains points on this machine, in turn or `jobs` at a time, that were all checked before."""

    runs_here = True

    def setup(self, *, hydra_context: Any, task_function: Any, config: DictConfig) -> None:
        self.hydra_context = hydra_context
        self.config = config
        self.folder = Path(config.hydra.sweep.dir)  # which fixes its ${now:...} for all jobs

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> list[JobReturn]:
        """Trains the points that a sweeper chooses which is not ours; they are noted."""
        node = self.config.hydra
        command = command_of(self.config)
        command.refuse(
            "dry_run", "task", reason=f"{node.sweeper._target_} lists no points beforehand"
        )
        sweep = Sweep([planned_point(words) for words in job_overrides])
        check_choice(sweep.points, node.sweeper._target_)
        sweep.check(self.runs_here)
        notes = Notes(self.folder)
        numbers = range(initial_job_idx, initial_job_idx + len(sweep.points))
        for number, point in zip(numbers, sweep.points, strict=True):
            notes.add(number, point)
        ends = list[JobReturn]()
        errors = self.train(sweep.points, initial_job_idx)
        for number, point, error in zip(numbers, sweep.points, errors, strict=True):
            if error is None:
                end = JobReturn(point.words, status=JobStatus.COMPLETED)
                end.return_value = objective(point, command.objective)
            else:
                end = JobReturn(point.words, status=JobStatus.FAILED)
                end.return_value = error
                notes.add_error(number, error)
            ends.append(end)
        return ends

    def train(self, points: Sequence[Point], first: int) -> Iterator[OneLineError | None]:
        """Trains points, and yields the error of each; one that fails ends no other."""
        jobs = command_of(self.config).jobs
        if jobs is not None:
            yield from in_processes(points, jobs)
            return
        for number, point in enumerate(points, first):
            yield self.job(number, point)

    def job(self, number: int, point: Point) -> OneLineError | None:
        """Trains a point in this process, as Hydra's own launcher runs a job."""
        node = self.config.hydra
        configure_log(node.hydra_logging, node.verbose)
        end = run_job(
            hydra_context=self.hydra_context,
            # the point has been checked; its tree is for HydraConfig and for callbacks
            task_function=lambda tree: train_here(point),
            config=point.job(self.config, number),
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        return error_of(end)


class LocalLauncher(CheckedLauncher):
    """Trains each point in a job of submitit on this machine."""

    kind: type[Jobs] = Jobs

    def __init__(self, **_: Any):
        """The keys of hydra.launcher are read in their tree, where they are plain values."""

    def setup(self, **given: Any) -> None:
        super().setup(**given)
        settings: Any = OmegaConf.to_container(self.config.hydra.launcher, resolve=True)
        command_of(self.config).refuse_beside(settings["_target_"], "jobs", "task")
        self.jobs = self.kind(settings)

    def train(self, points: Sequence[Point], first: int) -> Iterator[OneLineError | None]:
        return self.jobs.train(points, first, self)

    def __call__(self, point: Point, number: int, state: Any) -> None:
        """Trains a point in its job, to which submitit sends a copy of this launcher."""
        Singleton.set_state(state)
        setup_globals()
        in_job(point, self.jobs.settings["cpus_per_task"], partial(self.job, number, point))

    def checkpoint(self, *arguments: Any) -> Any:
        """Returns what submitit submits when it queues a job again: the same."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *arguments)


class SlurmLauncher(LocalLauncher):
    """Trains points in an array of SLURM."""

    runs_here = False
    kind = SlurmJobs


class PointSweeper(BasicSweeper):
    """Every value by every other, as Hydra's own sweeper, for any launcher.

    All points are checked before the first one starts, or listed.
    """

    def __init__(self, params: dict[str, str] | None = None):
        super().__init__(max_batch_size=None, params=params)

    def sweep(self, arguments: list[str]) -> Any:
        assert self.config is not None and self.launcher is not None
        command = command_of(self.config)
        if isinstance(self.launcher, CheckedLauncher):
            runs_here = self.launcher.runs_here
        else:
            target = self.config.hydra.launcher._target_
            command.refuse_beside(target, "jobs", "task")
            runs_here = not target.startswith(RAY)
        sweep = self.sweep_of(arguments)
        if command.dry_run:
            say(sweep.listing())
            return []
        sweep = sweep.only(command.task)
        sweep.check(runs_here)
        errors = sweep.wait(self.ends_of(sweep.points, command.task or 0))
        sweep.conclude(errors)
        return []

    def ends_of(self, points: Sequence[Point], first: int) -> Iterator[OneLineError | None]:
        """Lets the launcher train points, the first of this number; yields the error of each."""
        assert self.launcher is not None  # of a sweep
        if isinstance(self.launcher, CheckedLauncher):
            yield from self.launcher.train(points, first)
            return
        words = [point.words_of_job for point in points]
        yield from map(error_of, self.launcher.launch(words, first))

    def sweep_of(self, arguments: list[str]) -> Sweep:
        return Sweep.over_keys([*self._parse_config(), *arguments])


class StudySweeper(PointSweeper):
    """The runs of a study, seed by seed, with `arguments` as overrides of all of them."""

    def __init__(self, **words: Any):
        super().__init__()
        self.words = words

    def sweep_of(self, arguments: list[str]) -> Sweep:
        return Sweep.of_study(validated(StudyWords, self.words), arguments)
