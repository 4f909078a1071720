"""Hardware names, usable cores and glibc's memory allocator.

Imports torch only to name a GPU.
"""

import ctypes
import math
import os
import platform
from contextlib import suppress
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")  # Linux only
CGROUP = Path("/sys/fs/cgroup")  # of a container, with its quota
CORES = "REPRODUCTION_CORES"  # environment variable: cores for this run, if several run at a time


def hardware_name(device: str) -> str:
    """Returns the name of the GPU, or of the processor with its number of usable cores.

    `device` is `auto`, `cpu` or `cuda`; without a GPU all of them mean the processor.
    """
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
    cores = usable_cores()
    return f"{_processor()} ({cores} core{'s' if cores > 1 else ''})"


def usable_cores() -> int:
    """Returns the number of cores of this process: the machine's, its affinity's or its quota's."""
    has_affinity = hasattr(os, "sched_getaffinity")  # missing on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # the other version of cgroups, or `max`
            quota, period = map(int, " ".join((CGROUP / x).read_text() for x in names).split())
            if quota > 0:  # -1: none
                return max(1, min(cores, math.ceil(quota / period)))
    return cores


def join_hardware(earlier: str | None, now: str) -> str:
    """Joins the hardware names of a resumed run, each once, in order."""
    names = [] if earlier is None else earlier.split(", then ")
    return ", then ".join(dict.fromkeys([*names, now]))


def _processor() -> str:
    if CPU_INFO.is_file():
        for line in CPU_INFO.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return " ".join(value.split())
    return platform.processor() or platform.machine() or "unknown processor"


TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of mallopt(3)


def keep_freed_memory() -> None:
    """Makes glibc reuse freed memory instead of returning it to the kernel.

    By default, large tensors are returned and every step pays for new, zeroed pages.
    """
    if _is_glibc():
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(TRIM_THRESHOLD, -1)  # never
        mallopt(MMAP_MAX, 0)


def give_back_freed_memory() -> None:
    """Returns freed memory to the kernel once, before forks that would hold a copy of it."""
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
