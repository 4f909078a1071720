"""Damaged and malicious files."""

import pickle
import resource
from pathlib import Path

from tests.chaos.files import HARMS, foreign_files, harm_foreign, harm_own, other_files, own_files
from tests.chaos.malice import malicious_files

MOST_MEMORY = 200  # MiB more than before, at any time


def most_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_our_own_files_are_refused_when_damaged_or_equal(tmp_path: Path):
    originals, others = own_files(tmp_path / "run"), other_files(tmp_path / "others")
    found = harm_own(originals, others, count=500, seed=0)
    assert found.total() == 500
    assert sum(n for told, n in found.items() if told.endswith(": refused")) > 480
    assert len({told.partition(":")[0] for told in found}) == 2 * (len(HARMS) + 1)
    assert not any("another file: equal" in told for told in found)


def test_files_of_others_execute_nothing_and_are_refused_in_one_line(tmp_path: Path):
    originals, before = foreign_files(tmp_path / "foreign"), most_memory()
    found = harm_foreign(originals, tmp_path, count=200, seed=0)
    assert found.total() == 200
    assert most_memory() - before < MOST_MEMORY
    assert sum(n for told, n in found.items() if told.endswith(": refused")) > 150


def test_malicious_files_are_dangerous_to_who_unpickles_them(tmp_path: Path):
    executed = tmp_path / "executed"
    pickles = {told: data for told, data in malicious_files(executed) if "mkdir" in told}
    for told in ("REDUCE", "INST", "OBJ", "STACK_GLOBAL", "BUILD"):
        pickle.loads(pickles[f"os.mkdir by {told}, pickle"])
        executed.rmdir()
