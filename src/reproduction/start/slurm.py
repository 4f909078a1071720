"""Runs the points of a sweep as tasks of one SLURM array, by submitit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from reproduction.system.errors import PlainError, RunInterrupted, first_line
from reproduction.system.terminal import say

OF_ALL_CLUSTERS = ("name", "timeout_min", "mem_gb", "cpus_per_task", "gpus_per_node")


@dataclass(frozen=True)
class Task:
    """Starts a point in a job and returns its failure, or None; requeued after a time limit."""

    start: Callable[[Sequence[str], str], Exception | None]

    def __call__(self, overrides: Sequence[str], place: str) -> Exception | None:
        return self.start(overrides, place)

    def checkpoint(self, *arguments: Any) -> Any:
        """Called by submitit when the time is up, after the run has written a checkpoint."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *arguments)


def in_jobs(task: Task, points: Sequence[Sequence[str]], settings: dict[str, Any]) -> list[Any]:
    """Submits a job for each point, waits for them and returns their failures, None for success.

    `settings` are those of conf/hydra/launcher/slurm.yaml.
    """
    import submitit

    own = dict(settings)
    cluster, folder = own.pop("cluster"), own.pop("submitit_folder")
    limit = own.pop("max_num_timeout")
    named = {key if key in OF_ALL_CLUSTERS else f"slurm_{key}": own[key] for key in own}
    places = [f"run {number} of {len(points)}" for number in range(1, len(points) + 1)]
    try:
        executor = submitit.AutoExecutor(folder, cluster, slurm_max_num_timeout=limit)
        executor.update_parameters(**named)
        jobs = executor.map_array(task, points, places)
    except Exception as error:  # no SLURM, or an option that it refuses
        raise PlainError(f"hydra/launcher=slurm: {first_line(error)}") from error
    say(f"hydra/launcher=slurm: waiting for the runs, logs in {folder}")
    try:
        return [_outcome(job) for job in jobs]
    except KeyboardInterrupt:
        raise RunInterrupted("interrupted; submitted jobs continue") from None


def _outcome(job: Any) -> Any:
    try:
        return job.result()
    except Exception as error:  # a job that ended without a word
        return PlainError(f"job {job.job_id}: {first_line(error)}")
