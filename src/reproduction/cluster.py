"""SLURM, as its jobs and those who submit them see it: the id of a job, and what squeue lists."""

import os
import signal
import subprocess

SECONDS_OF_SQUEUE = 5.0  # a run that is about to be killed cannot wait for longer


def job_id() -> str | None:
    """Returns the job in which this process runs, by the name that squeue has for it."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array is not None:
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def is_restarted() -> bool:
    """Whether SLURM has started this job before, which may not have ended everywhere."""
    return "SLURM_RESTART_COUNT" in os.environ


def queued_jobs() -> dict[str, str] | None:
    """Returns the states of this user's jobs that wait or run; None if squeue does not answer."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i %T"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=SECONDS_OF_SQUEUE
        )
    except (OSError, subprocess.SubprocessError):
        return None
    states = {}
    for line in answer.stdout.splitlines():
        job, _, state = line.partition(" ")
        states[job] = state
    return states


def goes_on(signum: int) -> bool:
    """Whether a job that has received a signal shall be queued again, and is not to end.

    USR2 announces the time limit. Another signal to a job that SLURM lists as running announces
    preemption; scancel has changed its state.
    """
    if signum == signal.SIGUSR2:
        return True
    job = job_id()
    if job is None:
        return False
    states = queued_jobs()
    return states is not None and states.get(job) == "RUNNING"
