"""These tests need a cluster of SLURM, and disturb it: only `make test-slurm` collects them."""

import os
import shutil
import subprocess

import pytest


def missing() -> str:
    """What these tests need, and this machine has not."""
    for command in ("sinfo", "sbatch", "squeue", "scancel", "scontrol", "sacct"):
        if shutil.which(command) is None:
            return f"{command} is not here: these tests need a cluster of SLURM"
    if os.geteuid() != 0:
        return "these tests need root, who may end nodes"
    command = ["sinfo", "--noheader", "--format=%R %p"]  # partitions and their tiers
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        return f"no cluster answers: {answer.stderr.strip()}"
    tiers = {line.split()[1] for line in answer.stdout.splitlines()}
    return "" if len(tiers) > 1 else "these tests need a partition that preempts another one"


is_asked = "TEST_SLURM" in os.environ
collect_ignore = [] if is_asked else ["test_slurm.py"]


def pytest_sessionstart() -> None:
    if is_asked and missing():
        pytest.exit(missing(), 1)
