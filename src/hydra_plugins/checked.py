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
from omegaconf import DictConfig, OmegaConf

from reproduction.application import Notes
from reproduction.compose import Point, command_of, planned_point
from reproduction.config import StudyWords, validated
from reproduction.errors import OneLineError, say
from reproduction.jobs import in_processes, objective, train_here
from reproduction.submitted import Jobs, SlurmJobs, in_job
from reproduction.sweep import PointLauncher, Sweep, check_choice, error_of


class CheckedLauncher(PointLauncher):
    """Trains points on this machine, in turn or `jobs` at a time, that were all checked before."""

    def setup(self, *, hydra_context: Any, task_function: Any, config: DictConfig) -> None:
        self.hydra_context = hydra_context
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> list[JobReturn]:
        """Trains the points that a sweeper chooses which is not ours; they are noted."""
        own = self.config.hydra
        command = command_of(self.config)
        command.refuse(
            "dry_run", "task", reason=f"{own.sweeper._target_} lists no points beforehand"
        )
        sweep = Sweep([planned_point(words) for words in job_overrides])
        check_choice(sweep.points, own.sweeper._target_)
        sweep.check(own.launcher._target_)
        notes = Notes(Path(own.sweep.dir))
        for number, planned in enumerate(sweep.points, initial_job_idx):
            notes.add(number, planned)
        ends = list[JobReturn]()
        errors = [*self.train(sweep.points, initial_job_idx)]
        for planned, error in zip(sweep.points, errors, strict=True):
            end = JobReturn(planned.words, status=JobStatus.COMPLETED)
            end.return_value = objective(planned, command.objective)
            if error is not None:
                notes.add_error(initial_job_idx + len(ends), error)
                end.status = JobStatus.FAILED
                end.return_value = error
            ends.append(end)
        return ends

    def train(self, points: Sequence[Point], first: int = 0) -> Iterator[OneLineError | None]:
        """Trains points, and yields the error of each; one that fails ends no other."""
        jobs = command_of(self.config).jobs
        if jobs is not None:
            yield from in_processes(points, jobs)
            return
        for number, planned in enumerate(points, first):
            yield self.job(number, planned)

    def job(self, number: int, planned: Point) -> OneLineError | None:
        """Trains a point in this process, as Hydra's own launcher runs a job."""
        own = self.config.hydra
        configure_log(own.hydra_logging, own.verbose)
        assert own.sweep.dir  # which has the time: its first reader decides it for all jobs
        end = run_job(
            hydra_context=self.hydra_context,
            task_function=lambda tree: train_here(planned),
            config=planned.job(self.config, number),
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
        own: Any = OmegaConf.to_container(self.config.hydra.launcher, resolve=True)
        reason = f"is for hydra/launcher=checked, not {own['_target_']}"
        command_of(self.config).refuse("jobs", "task", reason=reason)
        self.jobs = self.kind(own)

    def train(self, points: Sequence[Point], first: int = 0) -> Iterator[OneLineError | None]:
        return self.jobs.train(points, first, self)

    def __call__(self, planned: Point, number: int, state: Any) -> None:
        """Trains a point in its job."""
        Singleton.set_state(state)
        setup_globals()
        in_job(planned, self.jobs.own["cpus_per_task"], partial(self.job, number, planned))

    def checkpoint(self, *arguments: Any) -> Any:
        """Returns what submitit submits when it queues a job again: the same."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *arguments)


class SlurmLauncher(LocalLauncher):
    """Trains points in an array of SLURM."""

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
        if not isinstance(self.launcher, CheckedLauncher):
            target = self.config.hydra.launcher._target_
            command.refuse("jobs", "task", reason=f"is for hydra/launcher=checked, not {target}")
        sweep = self.planned(arguments)
        if command.dry_run:
            say(sweep.listing())
            return []
        sweep = sweep.only(command.task)
        sweep.check(self.config.hydra.launcher._target_)
        errors = sweep.launch(self.launcher, command.task or 0)
        sweep.conclude(errors)
        return []

    def planned(self, arguments: list[str]) -> Sweep:
        return Sweep.over_keys([*self._parse_config(), *arguments])


class StudySweeper(PointSweeper):
    """The runs of a study, seed by seed, with `arguments` as overrides of all of them."""

    def __init__(self, **words: Any):
        super().__init__()
        self.words = words

    def planned(self, arguments: list[str]) -> Sweep:
        return Sweep.of_study(validated(StudyWords, self.words), arguments)
