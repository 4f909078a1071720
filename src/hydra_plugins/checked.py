"""Hydra's plugins of this project: two sweepers, whose runs any launcher trains, and a launcher.

Hydra finds them here, and executes this file for it: nothing else imports it. Hydra's own launcher
and sweeper, which they extend, have no public name, nor has what a job that failed has raised.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from reproduction.application import objective
from reproduction.compose import command_of, expand, plan_run
from reproduction.config import StudyOptions, validated
from reproduction.errors import Interrupted, OneLineError, PlainError, UserError, first_line, say
from reproduction.jobs import in_processes
from reproduction.sweep import Sweep, check_here


class GridSweeper(BasicSweeper):
    """Every value by every other, as Hydra's own sweeper; ends with a table.

    All runs are checked before the first one starts, or listed.
    """

    def __init__(self, params: dict[str, str] | None = None):
        super().__init__(max_batch_size=None, params=params)

    def sweep(self, arguments: list[str]) -> Any:
        assert self.config is not None
        assert self.launcher is not None
        running: Any = HydraConfig.instance()
        running.cfg = self.config  # of which runs are composed
        directory = Path(self.config.hydra.sweep.dir)  # first: a time in it is that of all runs
        command = command_of(self.config)
        is_here = isinstance(self.launcher, ProcessLauncher)
        if command.jobs is not None and not is_here:
            raise UserError(f"jobs={command.jobs}: needs hydra/launcher=processes")
        sweep = self.sweep_of(arguments)
        if command.dry_run:
            say(sweep.listing())
            return
        sweep = sweep.only(command.task)
        sweep.check_folders()
        if is_here:
            check_here(sweep.plans)
        directory.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, directory / "multirun.yaml")
        try:
            ends = self.launcher.launch(
                [plan.overrides for plan in sweep.plans], initial_job_idx=command.task or 0
            )
        except KeyboardInterrupt as interrupt:
            line = f"interrupted; {sweep.plans[0].config.how_to_continue}"
            sweep.conclude([Interrupted(str(interrupt) or line)])
            return
        plans, errors = [], []
        for plan, end in zip(sweep.plans, ends, strict=True):
            job: Any = end.hydra_cfg  # a job's ${now:} may be later than that of its plan
            plans.append(plan.at(Path(job.hydra.runtime.output_dir)))
            if end.status == JobStatus.FAILED:
                error = end._return_value  # Hydra's property would raise it
                is_ours = isinstance(error, OneLineError)
                errors.append(error if is_ours else PlainError(first_line(error)))
        replace(sweep, plans=plans).conclude(errors)

    def sweep_of(self, arguments: list[str]) -> Sweep:
        runs = enumerate(expand([*self._parse_config(), *arguments]))
        return Sweep([plan_run(overrides).placed(number) for number, overrides in runs])


class StudySweeper(GridSweeper):
    """The runs of a study, seed by seed, with `arguments` as overrides of all of them."""

    def __init__(self, **options: Any):
        super().__init__()
        self.options = options

    def sweep_of(self, arguments: list[str]) -> Sweep:
        return Sweep.of_study(validated(StudyOptions, self.options), arguments)


class ProcessLauncher(BasicLauncher):
    """Hydra's own launcher, but jobs=N trains that many at a time, each in a process."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Any:
        assert self.config is not None
        command = command_of(self.config)
        if command.jobs is None:
            return super().launch(job_overrides, initial_job_idx)
        running: Any = HydraConfig.instance()
        running.cfg = self.config
        plans = [
            plan_run(overrides).placed(number)
            for number, overrides in enumerate(job_overrides, initial_job_idx)
        ]
        ends = []
        for plan, error in zip(plans, in_processes(plans, command.jobs), strict=True):
            end = JobReturn(overrides=plan.overrides, status=JobStatus.FAILED, _return_value=error)
            directory = str(plan.path)
            end.hydra_cfg = OmegaConf.create({"hydra": {"runtime": {"output_dir": directory}}})
            if error is None:
                end.status = JobStatus.COMPLETED
                end.return_value = objective(plan, command.objective)
            ends.append(end)
        return ends
