"""Runs as jobs of submitit, of SLURM or of this machine: submitted, waited for, and in the job.

A job ends with the line and the status of train.py. What has become of a run is told by its folder,
also after a job that could tell nothing; the lock in it names the job to which the run was given.
"""

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton

from reproduction.cluster import goes_on, queued_jobs
from reproduction.compose import Point
from reproduction.config import TRAIN
from reproduction.errors import (
    NOTE,
    OneLineError,
    PlainError,
    Stopped,
    UserError,
    counts_text,
    noted_error,
    one_line_errors,
    say,
)
from reproduction.folder import hold
from reproduction.machine import CORES
from reproduction.sweep import Sweep, run_of

LONGEST_PAUSE = 30.0  # seconds between looks at the jobs


class Jobs:
    """Jobs of this machine, with what hydra.launcher says of them."""

    cluster = "local"

    def __init__(self, settings: Mapping[str, Any]):
        self.word = f"hydra/launcher=submitit_{self.cluster}"
        self.settings = settings
        self.submitted: dict[str, Any] = {}  # submitit's, by their ids; of the latest points
        for name in ("nodes", "tasks_per_node"):
            if settings[name] != 1:
                reason = "must be 1: a run is one task, in which devices=N starts N processes"
                raise UserError(f"hydra.launcher.{name}={settings[name]}: {reason}")

    def train(
        self, points: Sequence[Point], first: int, task: Any
    ) -> Iterator[OneLineError | None]:
        """Submits what is neither finished nor queued nor running, and waits for all jobs.

        Jobs call task(point, number, Hydra's state). Yields the error of each point or None.
        """
        self.submitted = {}
        jobs = self.queued(points)
        new = {}
        for index, point in enumerate(points):
            if not (index in jobs or point.folder.is_finished() or point.folder.is_locked()):
                new[index] = point
        if new:
            numbers = [first + index for index in new]
            jobs |= zip(new, self.submit([*new.values()], numbers, task), strict=True)
        self.wait(jobs.values())
        for index, point in enumerate(points):
            yield self.error_of(point, jobs.get(index))

    def queued(self, points: Sequence[Point]) -> dict[int, str]:
        """Returns the jobs that were submitted before for points, by the places of these."""
        states = self.states()
        if states is None:
            if shutil.which("squeue") is None:
                reason = "squeue is not installed: there is no SLURM on this machine"
                raise UserError(f"{self.word}: {reason}")
            raise PlainError("squeue does not answer, and only it knows what is queued")
        jobs = {}
        for index, point in enumerate(points):
            job = point.folder.job()
            if job is not None and job in states:
                say(f"{point.folder.path}: job {job} is {states[job]}, and is not submitted again")
                jobs[index] = job
        return jobs

    def submit(self, points: Sequence[Point], numbers: Sequence[int], task: Any) -> list[str]:
        """Submits a job for each point, and returns their ids."""
        states = [Singleton.get_state()] * len(points)
        try:
            with redirect_stderr(io.StringIO()):  # submitit prints what it raises
                jobs = self.executor().map_array(task, points, numbers, states)
        except ModuleNotFoundError as error:
            reason = "needs a package: pip install submitit==1.5.4"
            raise UserError(f"{self.word}: {reason}") from error
        except (RuntimeError, ValueError) as error:
            raise UserError(f"{self.word}: {error}") from error
        self.submitted = {job.job_id: job for job in jobs}
        for point, job in zip(points, self.submitted, strict=True):
            point.folder.give_to(job)
            say(f"{point.folder.path}: job {job}")
        return [*self.submitted]

    def executor(self, **more: Any) -> Any:
        """Returns submitit's executor; `more` are further parameters of sbatch."""
        import submitit

        parameters = {f"{self.cluster}_{key}": x for key, x in {**self.settings, **more}.items()}
        for key in ("_target_", "submitit_folder"):
            del parameters[f"{self.cluster}_{key}"]
        of_class = {}
        most = f"{self.cluster}_max_num_timeout"
        if most in parameters:
            of_class[most] = parameters.pop(most)
        executor = submitit.AutoExecutor(self.settings["submitit_folder"], self.cluster, **of_class)
        executor.update_parameters(**parameters)
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
                text = counts_text(counts)
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
                return noted_error(noted(paths))
            job += f" ({paths.stderr})"
        text = f"{folder.path}: {run_of(point).status_text}, and job {job} has ended"
        return PlainError(f"{text}; {point.config.how_to_continue}")


class SlurmJobs(Jobs):
    """An array of SLURM."""

    cluster = "slurm"

    def submit(self, points: Sequence[Point], numbers: Sequence[int], task: Any) -> list[str]:
        for point in points:
            if point.config.resume != "auto":
                reason = "must be auto, since SLURM may end a job and start it again"
                raise UserError(f"resume={point.config.resume}: {reason}")
        return super().submit(points, numbers, task)

    def executor(self, **more: Any) -> Any:
        more["additional_parameters"] = {"requeue": True, **self.settings["additional_parameters"]}
        more["srun_args"] = [f"--cpus-per-task={self.settings['cpus_per_task'] or 1}"]
        return super().executor(**more)

    def states(self) -> dict[str, str] | None:
        return queued_jobs()

    def wait(self, jobs: Collection[str]) -> None:
        try:
            super().wait(jobs)
        except KeyboardInterrupt as interrupt:
            reason = "the jobs go on until `scancel`, and the same command waits for them"
            raise KeyboardInterrupt(f"interrupted; {reason}") from interrupt


def noted(paths: Any) -> Path:
    """Returns the file with the line and the status of a job that has ended by an error."""
    return Path(paths.folder, f"{paths.job_id}_error.json")


# --- in a job -----------------------------------------------------------------------------------


def in_job(point: Point, cores: int | None, train: Callable[[], OneLineError | None]) -> None:
    """Checks and trains a point here, and ends with a line and a status, or is queued again.

    `train` returns an error or None, and raises KeyboardInterrupt after a signal.
    """
    import submitit

    sys.argv = [str(TRAIN)]  # which says its errors,
    sys.path[0] = str(TRAIN.parent)  # and beside which own code lies
    signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGUSR2))  # while there is no run
    if cores is not None:  # torch, which reads them, is not imported yet
        os.environ[CORES] = str(cores)
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // point.config.devices)))
    os.environ[NOTE] = str(noted(submitit.JobEnvironment().paths))
    with one_line_errors():
        Sweep([point]).check()
        try:
            error = train()
        except KeyboardInterrupt as interrupt:
            queue_again(interrupt)
            raise
        if error is not None:
            raise error


def queue_again(interrupt: KeyboardInterrupt) -> None:
    """Has submitit queue this job again, and ends it, unless the signal was to end the run."""
    stop = interrupt.__cause__
    if not (isinstance(stop, Stopped) and goes_on(stop.signum)):
        return
    try:
        signal.raise_signal(signal.SIGUSR2)  # submitit's handler exits
    except (RuntimeError, subprocess.SubprocessError) as error:
        raise PlainError(f"{interrupt}: {error}") from error
