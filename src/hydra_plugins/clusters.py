"""Launchers that train each point of a sweep in a job of submitit: of SLURM, or of this machine.

A job ends with the line and the status of train.py. What has become of a run is told by its folder,
also after a job that could tell nothing; the lock in it names the job to which the run was given.
"""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import setup_globals
from omegaconf import OmegaConf

from hydra_plugins.checked import CheckedLauncher
from reproduction.application import NotedError
from reproduction.cluster import goes_on, queued_jobs
from reproduction.compose import Point, command_of
from reproduction.config import TRAIN
from reproduction.errors import (
    OneLineError,
    PlainError,
    Stopped,
    UserError,
    one_line_errors,
    say,
)
from reproduction.files import write_text
from reproduction.folder import hold
from reproduction.machine import CORES
from reproduction.sweep import Sweep, run_of

LONGEST_PAUSE = 30.0  # seconds between looks at the jobs


class LocalLauncher(CheckedLauncher):
    """Trains points in jobs of this machine."""

    cluster = "local"

    def __init__(self, **_: Any) -> None:
        self.submitted: dict[str, Any] = {}  # jobs of submitit by their ids

    def setup(self, **given: Any) -> None:
        super().setup(**given)
        own = self.config.hydra.launcher
        reason = f"is for hydra/launcher=checked, not {own._target_}"
        command_of(self.config).refuse("jobs", "task", reason=reason)
        for name in ("nodes", "tasks_per_node"):
            if own[name] != 1:
                reason = "must be 1: a run is one task, in which devices=N starts N processes"
                raise UserError(f"hydra.launcher.{name}={own[name]}: {reason}")

    # Where jobs are submitted

    def train(self, points: Sequence[Point], first: int = 0) -> Iterator[OneLineError | None]:
        """Submits what is neither finished nor queued nor running, and waits for all jobs."""
        self.submitted = {}
        jobs = self.queued(points)
        new = {}
        for index, point in enumerate(points):
            if not (index in jobs or point.folder.is_finished() or point.folder.is_locked()):
                new[index] = point
        if new:
            jobs |= zip(new, self.submit([*new.values()], [first + x for x in new]), strict=True)
        self.wait(jobs.values())
        for index, point in enumerate(points):
            yield self.error_of(point, jobs.get(index))

    def queued(self, points: Sequence[Point]) -> dict[int, str]:
        """Returns the jobs that were submitted before for points, by the places of these."""
        states = self.states()
        if states is None:
            raise PlainError("squeue does not answer, and only it knows what is queued")
        jobs = {}
        for index, point in enumerate(points):
            job = point.folder.job()
            if job is not None and job in states:
                say(f"{point.folder.path}: job {job} is {states[job]}, and is not submitted again")
                jobs[index] = job
        return jobs

    def submit(self, points: Sequence[Point], numbers: Sequence[int]) -> list[str]:
        """Submits a job for each point, and returns their ids."""
        states = [Singleton.get_state()] * len(points)
        try:
            with redirect_stderr(io.StringIO()):  # submitit prints what it raises
                jobs = self.executor().map_array(self, points, numbers, states)
        except ModuleNotFoundError as error:
            reason = "needs a package: pip install submitit==1.5.4"
            raise UserError(f"hydra/launcher=submitit_{self.cluster}: {reason}") from error
        except (RuntimeError, ValueError) as error:
            raise UserError(f"hydra/launcher=submitit_{self.cluster}: {error}") from error
        self.submitted = {job.job_id: job for job in jobs}
        for point, job in zip(points, jobs, strict=True):
            point.folder.give_to(job.job_id)
            say(f"{point.folder.path}: job {job.job_id}")
        return [*self.submitted]

    def executor(self, **more: Any) -> Any:
        """Returns submitit's executor, with what hydra.launcher says."""
        import submitit

        own: Any = OmegaConf.to_container(self.config.hydra.launcher, resolve=True)
        del own["_target_"]
        most = own.pop("max_num_timeout", None)
        of_class = {} if most is None else {f"{self.cluster}_max_num_timeout": most}
        executor = submitit.AutoExecutor(own.pop("submitit_folder"), self.cluster, **of_class)
        own |= more
        executor.update_parameters(**{f"{self.cluster}_{key}": own[key] for key in own})
        return executor

    def states(self) -> dict[str, str] | None:
        """Returns the states of the jobs that wait or run, by their ids; None if nobody tells."""
        return {job: x.state for job, x in self.submitted.items() if not x.done()}

    def wait(self, jobs: Collection[str]) -> None:
        """Waits until none of these jobs waits or runs, and says what it waits for."""
        told = ""
        pause = 1.0
        while True:
            states = self.states()
            text = "squeue does not answer"
            if states is not None:
                counts = Counter(states[job] for job in jobs if job in states)
                if not counts:
                    return
                text = ", ".join(f"{count} {state}" for state, count in counts.items())
            if text != told:
                say(f"waiting for jobs: {text}")
            told = text
            time.sleep(pause)
            pause = min(1.1 * pause, LONGEST_PAUSE)

    def error_of(self, point: Point, job: str | None) -> OneLineError | None:
        """Returns what to say of a run, whose job has ended; None of a finished one."""
        folder = point.folder
        if folder.is_finished():
            return None
        if job is None:
            return UserError(f"name={point.config.name}: {folder.holder()} trains {folder.path}")
        if not folder.is_taken():
            with suppress(UserError), hold(folder):  # which leaves no folder without a run
                pass
        if job in self.submitted:
            paths = self.submitted[job].paths
            if noted(paths).exists():
                return NotedError(*json.loads(noted(paths).read_text()))
            job += f" ({paths.stderr})"
        text = f"{folder.path}: {run_of(point).status_text}, and job {job} has ended"
        return PlainError(f"{text}; {point.config.how_to_continue}")

    # In a job

    def __call__(self, point: Point, number: int, state: Any) -> None:
        """Trains a point, and ends with a line and a status, or lets the job be queued again."""
        import submitit

        sys.argv = [str(TRAIN)]  # says who ends
        signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGUSR2))  # while there is no run
        self.divide_cores(point.config.devices)
        Singleton.set_state(state)
        setup_globals()
        with one_line_errors():
            try:
                Sweep([point]).check()
                error = self.job(number, point)
            except OneLineError as refused:
                error = refused
            except KeyboardInterrupt as interrupt:
                self.queue_again(interrupt)
                raise
            if error is not None:
                write_text(
                    noted(submitit.JobEnvironment().paths), json.dumps((str(error), error.status))
                )
                raise error

    def divide_cores(self, devices: int) -> None:
        """Gives a run the threads of the cores of hydra.launcher; torch is not imported yet."""
        cores = self.config.hydra.launcher.cpus_per_task
        if cores is not None:
            os.environ[CORES] = str(cores)
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // devices)))

    def queue_again(self, interrupt: KeyboardInterrupt) -> None:
        """Has submitit queue this job again, and ends it, unless the signal is to end it."""
        stop = interrupt.__cause__
        if not (isinstance(stop, Stopped) and goes_on(stop.signum)):
            return
        try:
            signal.raise_signal(signal.SIGUSR2)  # submitit's handler exits
        except (RuntimeError, subprocess.SubprocessError) as error:
            raise PlainError(f"{interrupt}: {error}") from error

    def checkpoint(self, *arguments: Any) -> Any:
        """What submitit submits when it queues a job again: the same."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *arguments)


class SlurmLauncher(LocalLauncher):
    """Trains points in an array of SLURM."""

    cluster = "slurm"

    def submit(self, points: Sequence[Point], numbers: Sequence[int]) -> list[str]:
        for point in points:
            if point.config.resume != "auto":
                reason = "must be auto, since SLURM may end a job and start it again"
                raise UserError(f"resume={point.config.resume}: {reason}")
        return super().submit(points, numbers)

    def executor(self, **more: Any) -> Any:
        own = self.config.hydra.launcher
        return super().executor(
            additional_parameters={"requeue": True, **own.additional_parameters},
            srun_args=[f"--cpus-per-task={own.cpus_per_task or 1}"],
            **more,
        )

    def states(self) -> dict[str, str] | None:
        return queued_jobs()

    def wait(self, jobs: Collection[str]) -> None:
        arrays = sorted(
            {job if job not in self.submitted else job.partition("_")[0] for job in jobs}
        )
        command = f"scancel {' '.join(arrays)}"
        if self.submitted:
            say(f"`{command}` ends the jobs, Ctrl-C the waiting for them alone")
        try:
            super().wait(jobs)
        except KeyboardInterrupt as interrupt:
            reason = f"`{command}` ends the jobs, which go on; the same command waits for them"
            raise KeyboardInterrupt(f"interrupted; {reason}") from interrupt


def noted(paths: Any) -> Path:
    """Returns the file with the line and the status of a job that has ended by an error."""
    return Path(paths.folder, f"{paths.job_id}_error.json")
