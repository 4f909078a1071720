"""metrics.jsonl read as a stream: means of epochs, the last one alone, damaged files."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reproduction.errors import UserError
from reproduction.reporting import curves
from reproduction.reporting.curves import last_epoch, lines_backwards, read_epochs, running_mean
from tests.reproduction.tables import write_metrics


def test_an_epoch_is_the_mean_of_its_batches_and_tokens_count_by_mixed_sample(tmp_path: Path):
    path = write_metrics(tmp_path / "m", [[(0, 0.0, 4.0), (0, 0.0, 3.0)], [(1, 10, 2), (3, 2, 1)]])
    first, second = read_epochs(path)
    assert first == (1, 0.0, None, 3.5)
    assert second == (2, 2.0, (10 + 3 * 2) / 4, 1.5)
    assert last_epoch(path) == second


@pytest.mark.parametrize("block", [1, 7, 64, 2**16])
def test_the_last_epoch_is_that_of_the_whole_file_whatever_the_blocks(tmp_path, block, monkeypatch):
    monkeypatch.setattr(curves, "BLOCK", block)
    path = write_metrics(tmp_path / "m", [[(i, 2.0, 1.0)] * 5 for i in range(4)])
    assert last_epoch(path) == read_epochs(path)[-1]
    assert b"\n".join(reversed(list(lines_backwards(path)))) == path.read_bytes()


def test_the_last_epoch_does_not_read_the_others(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(curves, "BLOCK", 100)
    path = write_metrics(tmp_path / "m", [[(1, 1.0, 1.0)] * 50, [(2, 1.0, 1.0)]])
    path.write_bytes(b"garbage" + path.read_bytes())
    assert last_epoch(path).mixed_samples == 2


@pytest.mark.parametrize("text", ["", '{"epoch": 1, "top1": 2.0}\n', '{"step": 1, "ep', "[1]\n7\n"])
@pytest.mark.parametrize("read", [read_epochs, last_epoch])
def test_a_file_without_whole_batches_is_refused(tmp_path: Path, text: str, read):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"metrics.jsonl: (holds no batches|not readable)"):
        read(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match=r"missing: not readable"):
        read(tmp_path / "missing")


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=20), st.integers(1, 25))
def test_running_mean_is_that_of_the_values_around(values: list[float], window: int):
    starts = range(-(window // 2), len(values) - window // 2)
    expected = [np.mean(values[max(0, start) : start + window]) for start in starts]
    assert running_mean(values, window) == pytest.approx(expected)
