"""What a process keeps of the memory that it frees."""

import platform
import subprocess
import sys

import pytest

FILL_TWICE = """
import resource
from reproduction.heap import keep_freed_memory

def pages_taken():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * (50 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

pages_taken()
print(pages_taken())
keep_freed_memory()
pages_taken()
print(pages_taken())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library cannot be told")
def test_freed_memory_serves_the_next_step():
    child = [sys.executable, "-c", FILL_TWICE]
    told = subprocess.run(child, capture_output=True, text=True, check=True).stdout
    before, after = map(int, told.split())
    size = (50 << 20) // 2**16  # in the largest pages that are in use
    assert before >= size
    assert after < size / 10
