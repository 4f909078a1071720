"""A process keeps freed memory for the next step, until it gives it back."""

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_keep_freed_memory_avoids_page_faults():
    child = [sys.executable, "-c", FILL_TWICE]
    out = subprocess.run(child, capture_output=True, text=True, check=True).stdout
    before, kept, given_back = map(int, out.split())
    minimum = 50 // 2  # huge pages
    assert before >= minimum and given_back >= minimum
    assert kept < before / 10
