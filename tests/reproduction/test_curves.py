"""Epochs of metrics.jsonl, also of damaged files."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reproduction.reporting.curves import read_epochs, running_mean
from reproduction.system.errors import UserError
from tests.reproduction.tables import write_metrics


def test_read_epochs_averages_batches_and_weights_tokens_by_mixed_samples(tmp_path: Path):
    path = write_metrics(tmp_path / "m", [[(0, 0.0, 4.0), (0, 0.0, 3.0)], [(1, 10, 2), (3, 2, 1)]])
    first, second = read_epochs(path)
    assert first == (1, 0.0, None, 3.5)
    assert second == (2, 2.0, (10 + 3 * 2) / 4, 1.5)


@pytest.mark.parametrize("text", ["", '{"epoch": 1, "top1": 2.0}\n', '{"step": 1, "ep', "[1]\n7\n"])
def test_files_without_complete_batches_are_refused(tmp_path: Path, text: str):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"metrics.jsonl: (holds no batches|not readable)"):
        read_epochs(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match=r"missing: not readable"):
        read_epochs(tmp_path / "missing")


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=20), st.integers(1, 25))
def test_running_mean_averages_a_centred_window(values: list[float], window: int):
    starts = range(-(window // 2), len(values) - window // 2)
    expected = [np.mean(values[max(0, start) : start + window]) for start in starts]
    assert running_mean(values, window) == pytest.approx(expected)
