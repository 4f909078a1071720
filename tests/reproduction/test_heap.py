"""What a process keeps of the memory that it frees."""

import platform
import subprocess
import sys

import pytest

FILL_TWICE = """
import resource
from reproduction.system.hardware import give_back_freed_memory, keep_freed_memory

def pages_taken():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * (50 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

pages_taken()
print(pages_taken())
keep_freed_memory()
pages_taken()
print(pages_taken())
give_back_freed_memory()
print(pages_taken())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library cannot be told")
def test_freed_memory_serves_the_next_step():
    child = [sys.executable, "-c", FILL_TWICE]
    told = subprocess.run(child, capture_output=True, text=True, check=True).stdout
    before, kept, given_back = map(int, told.split())
    least = 50 // 2  # of huge pages
    assert before >= least and given_back >= least
    assert kept < before / 10
