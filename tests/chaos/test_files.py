"""Damaged and malicious files are refused or read correctly."""

import pickle
import resource
from pathlib import Path

from tests.chaos.files import HARMS, foreign_files, harm_foreign, harm_own, other_files, own_files
from tests.chaos.malice import malicious_files

MEMORY_LIMIT = 200  # MiB by which the peak may grow


def peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_damaged_own_files_are_refused_or_read_as_equal(tmp_path: Path):
    originals, others = own_files(tmp_path / "run"), other_files(tmp_path / "others")
    results = harm_own(originals, others, count=500, seed=0)
    assert results.total() == 500
    assert (
        sum(n for case, n in results.items() if case.endswith(": refused")) > 430
    )  # a zip file has padding and dates
    assert len({case.partition(":")[0] for case in results}) == 2 * (len(HARMS) + 1)
    assert not any("another file: equal" in case for case in results)


def test_foreign_files_execute_nothing_and_are_refused_in_one_line(tmp_path: Path):
    originals, before = foreign_files(tmp_path / "foreign"), peak_memory()
    results = harm_foreign(originals, tmp_path, count=200, seed=0)
    assert results.total() == 200
    assert peak_memory() - before < MEMORY_LIMIT
    assert sum(n for case, n in results.items() if case.endswith(": refused")) > 150


def test_malicious_pickles_execute_when_unpickled_carelessly(tmp_path: Path):
    executed = tmp_path / "executed"
    pickles = {case: data for case, data in malicious_files(executed) if "mkdir" in case}
    for case in ("REDUCE", "INST", "OBJ", "STACK_GLOBAL", "BUILD"):
        pickle.loads(pickles[f"os.mkdir by {case}, pickle"])
        executed.rmdir()
