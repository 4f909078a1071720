"""The memory of tensors on a CPU. Only glibc can be told; elsewhere nothing changes."""

import ctypes
import platform

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
