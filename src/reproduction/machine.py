"""Ranks, cores, hardware and the revision of the code."""

import ctypes
import os
import platform
import subprocess
from pathlib import Path

CORES = "LOKY_MAX_CPU_COUNT"  # environment variable: cores for this run, if several run at a time
MEETING = "REPRODUCTION_MEETING"  # the file at which ranks meet that a run has started itself
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of mallopt(3)


def launched_ranks() -> int | None:
    """Returns the world size in a rank of torchrun or of training/ranks.py, None otherwise."""
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ or MEETING in os.environ
    if not is_launched or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["WORLD_SIZE"])


def local_ranks(devices: int) -> int:
    """Returns the number of ranks on this machine: as launched, else `devices`."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", devices))


def is_first_rank() -> bool:
    """Whether this process prints and writes files for all ranks."""
    return launched_ranks() is None or os.environ.get("RANK", "0") == "0"


def usable_cores() -> int:
    """Returns the cores of this process: as CORES says, else those that it may run on."""
    if CORES in os.environ:
        return int(os.environ[CORES])
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def hardware_name(device: str) -> str:
    """Returns the name of the GPU, unless there is none, or of the processor with its cores."""
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()} ({usable_cores()} cores)"


def git_revision() -> str | None:
    """The commit of this code, with `-dirty` if files have changed; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    here = Path(__file__).parent
    # git exports GIT_DIR and others to its hooks: those would name another repository
    outside = {name: x for name, x in os.environ.items() if not name.startswith("GIT_")}
    try:
        answer = subprocess.run(
            command, cwd=here, env=outside, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


def keep_freed_memory() -> None:
    """Makes glibc reuse freed memory; by default every step pays for new, zeroed pages."""
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(TRIM_THRESHOLD, -1)  # never
        mallopt(MMAP_MAX, 0)
