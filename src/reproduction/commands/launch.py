"""Runs the points of a sweep in processes of one of Hydra's launchers."""

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Generic, TypeVar, cast

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from reproduction.commands.launchers import PARALLEL, Parallel
from reproduction.runs.compose import Composed, compose, isolated_hydra
from reproduction.system.errors import PlainError, RunInterrupted, UserError, first_line
from reproduction.system.terminal import say, warn

Settings = TypeVar("Settings")

REPEAT = "repeat the command with resume=auto to continue"


@dataclass(frozen=True)
class Job(Generic[Settings]):
    """What a process of the launcher does for one of `points`; returns its failure.

    `parallel` are the processes on this machine; SLURM assigns GPUs and sends signals per job.
    """

    config_name: str
    points: int
    resolve: Callable[[Composed], Settings]
    check_all: Callable[[list[Settings], bool], None]
    main: Callable[[Settings], None]
    parallel: Parallel | None = None

    def __call__(self, _: DictConfig) -> BaseException | None:
        try:
            self._run()
        except (UserError, PlainError) as error:
            return error
        except KeyboardInterrupt as interrupt:
            if self.parallel is None:
                raise
            return RunInterrupted(str(interrupt))
        except Exception as error:
            warn(traceback.format_exc())  # tracebacks are lost in pickling
            return PlainError(first_line(error))
        return None

    def _run(self) -> None:
        task = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
        overrides = [str(override) for override in cast(list[Any], task)]
        place = f"run {HydraConfig.get().job.num + 1} of {self.points}"
        settings = self.resolve(compose(self.config_name, overrides))
        training: AbstractContextManager[None] = nullcontext()
        if self.parallel is not None:
            jobs = HydraConfig.get().launcher.n_jobs
            name = getattr(settings, "name", place)
            training = self.parallel.training(name, jobs if jobs > 0 else self.points)
        with training:
            say(f"{place}: {' '.join(overrides)}")
            self.check_all([settings], True)
            self.main(settings)


def launch(
    launcher: str, job: Job[Settings], overrides: list[str], devices: int
) -> list[Exception]:
    """Runs the job for all points of `overrides`, waits for them and returns their failures.

    `devices`: the most GPUs of a point.
    """
    from reproduction.training.distributed import visible_gpus
    from reproduction.training.endings import handling, stop_at_once

    starting = handling(stop_at_once)
    if launcher in PARALLEL:
        parallel = Parallel(Path(mkdtemp(prefix="sweep-")), visible_gpus(), devices)
        job, starting = replace(job, parallel=parallel), parallel.starting()
    with isolated_hydra(job_name=job.config_name), starting:
        starter = GlobalHydra.instance().hydra
        assert starter is not None
        say(f"hydra/launcher={launcher}: waiting for the runs")
        try:
            batches = starter.multirun(job.config_name, job, overrides)
        except Exception as error:  # from the launcher: no SLURM, or a job that died silently
            raise PlainError(f"hydra/launcher={launcher}: {first_line(error)}") from error
        except KeyboardInterrupt:
            hint = "submitted jobs continue" if job.parallel is None else REPEAT
            raise RunInterrupted(f"interrupted; {hint}") from None
    results = [job_return.return_value for batch in batches for job_return in batch]
    if any(isinstance(result, RunInterrupted) for result in results):
        raise RunInterrupted(f"interrupted; {REPEAT}")
    return [failure for failure in results if failure is not None]
