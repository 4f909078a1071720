"""What a run computes on, in words, and the memory that a CPU's tensors take.

Imports torch where a GPU has to be named, and only there.
"""

import ctypes
import os
import platform
from pathlib import Path

CPU_FACTS = Path("/proc/cpuinfo")  # of Linux


def hardware_name(device: str) -> str:
    """The GPU, or the processor with the cores that this process may use.

    `device` is `auto`, `cpu` or `cuda`; auto is a GPU where there is one.
    """
    if device != "cpu":
        import torch

        if device == "cuda" or torch.cuda.is_available():
            return torch.cuda.get_device_name()
    cores = usable_cores()
    return f"{_processor()} ({cores} core{'s' if cores > 1 else ''})"


def usable_cores() -> int:
    """Of this process: a job may have fewer than its machine."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def joined(earlier: str | None, now: str) -> str:
    """The hardware of a run that goes on: each name once, in order."""
    names = [] if earlier is None else earlier.split(", then ")
    return ", then ".join(dict.fromkeys([*names, now]))


def _processor() -> str:
    if CPU_FACTS.is_file():
        for line in CPU_FACTS.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return " ".join(value.split())
    return platform.processor() or platform.machine() or "unknown processor"


TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of mallopt(3)


def keep_freed_memory() -> None:
    """Lets the process keep what is freed, for the next step, which needs as much again.

    The C library would hand large tensors back to the kernel, and get new pages, zeroed one by one,
    in every step.
    """
    if is_told():
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(TRIM_THRESHOLD, -1)  # never
        mallopt(MMAP_MAX, 0)


def give_back_freed_memory() -> None:
    """Gives it back once, before processes are forked that would hold a copy of it."""
    if is_told():
        ctypes.CDLL(None).malloc_trim(0)


def is_told() -> bool:
    return platform.libc_ver()[0] == "glibc"
