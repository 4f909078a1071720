"""Epochs of metrics.jsonl, also of damaged files, and the regimes of Figure 4."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reproduction.reporting import curves
from reproduction.reporting.curriculum import Regimes, find_regimes
from reproduction.reporting.curves import last_epoch, lines_backwards, read_epochs, running_mean
from reproduction.system.errors import UserError
from tests.reproduction.tables import write_metrics

RNG = np.random.default_rng(0)


def test_read_epochs_averages_batches_and_weights_tokens_by_mixed_samples(tmp_path: Path):
    path = write_metrics(tmp_path / "m", [[(0, 0.0, 4.0), (0, 0.0, 3.0)], [(1, 10, 2), (3, 2, 1)]])
    first, second = read_epochs(path)
    assert first == (1, 0.0, None, 3.5)
    assert second == (2, 2.0, (10 + 3 * 2) / 4, 1.5)
    assert last_epoch(path) == second


@pytest.mark.parametrize("block", [1, 7, 64, 2**16])
def test_last_epoch_does_not_depend_on_the_block_size(tmp_path, block, monkeypatch):
    monkeypatch.setattr(curves, "BLOCK", block)
    path = write_metrics(tmp_path / "m", [[(i, 2.0, 1.0)] * 5 for i in range(4)])
    assert last_epoch(path) == read_epochs(path)[-1]
    assert b"\n".join(reversed(list(lines_backwards(path)))) == path.read_bytes()


def test_last_epoch_does_not_read_earlier_epochs(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(curves, "BLOCK", 100)
    path = write_metrics(tmp_path / "m", [[(1, 1.0, 1.0)] * 50, [(2, 1.0, 1.0)]])
    path.write_bytes(b"garbage" + path.read_bytes())
    assert last_epoch(path).mixed_samples == 2


@pytest.mark.parametrize("text", ["", '{"epoch": 1, "top1": 2.0}\n', '{"step": 1, "ep', "[1]\n7\n"])
@pytest.mark.parametrize("read", [read_epochs, last_epoch])
def test_files_without_complete_batches_are_refused(tmp_path: Path, text: str, read):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"metrics.jsonl: (holds no batches|not readable)"):
        read(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match=r"missing: not readable"):
        read(tmp_path / "missing")


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=20), st.integers(1, 25))
def test_running_mean_averages_a_centred_window(values: list[float], window: int):
    starts = range(-(window // 2), len(values) - window // 2)
    expected = [np.mean(values[max(0, start) : start + window]) for start in starts]
    assert running_mean(values, window) == pytest.approx(expected)


def curve(epochs: int, rise: int, slow: float, noise: float = 0.0) -> list[float]:
    """Few samples until `rise`, then abruptly 60 of 128, then 40 more with time constant `slow`."""
    after = np.maximum(np.arange(epochs) - rise, 0)
    values = np.where(np.arange(epochs) < rise, 4.0, 60 + 40 * (1 - np.exp(-after / slow)))
    return (values + noise * RNG.standard_normal(epochs)).tolist()


@pytest.mark.parametrize(("epochs", "rise"), [(1510, 12), (300, 6), (36, 3)])
@pytest.mark.parametrize("noise", [0.0, 0.8])
def test_find_regimes_recovers_known_boundaries(epochs, rise, noise):
    slow = epochs / 8
    regimes = find_regimes(curve(epochs, rise, slow, noise))
    assert regimes.rise == rise
    settled = rise + slow * np.log(40 / (0.05 * 100))  # 40 exp(-x / slow) = 5 % of the level
    assert regimes.convergence == pytest.approx(settled, abs=0.08 * epochs)


def test_find_regimes_dates_a_gradual_rise_at_a_fifth_of_its_height():
    ramp = [0.0] * 10 + [15.0, 40.0, 60.0, 80.0] + [100.0] * 186
    assert find_regimes(ramp).rise == 11
    assert 11 < (find_regimes(ramp).convergence or 0) < 25


@pytest.mark.parametrize(
    "values",
    [
        [],
        [3.0, 100.0],
        curve(19, 3, 2.0),  # too short
        [0.0] * 50,  # mixes nothing
        [128.0] * 50,  # mixes everything from the start
        np.linspace(0, 100, 200).tolist(),  # neither abrupt nor settled
        np.linspace(100, 0, 200).tolist(),
    ],
    ids=["empty", "two", "short", "none", "all", "ramp", "falls"],
)
def test_find_regimes_returns_none_without_regimes(values: list[float]):
    assert find_regimes(values) == Regimes(None, None)


def test_find_regimes_finds_a_rise_without_convergence():
    growing = [2.0] * 5 + np.linspace(50, 100, 195).tolist()
    assert find_regimes(growing) == Regimes(5, None)


def test_find_regimes_finds_convergence_without_a_rise():
    slow = (100 * (1 - np.exp(-np.arange(400) / 80))).tolist()
    regimes = find_regimes(slow)
    assert regimes.rise is None and regimes.convergence == pytest.approx(240, abs=25)


def test_find_regimes_ignores_single_outliers():
    values = curve(300, 6, 30.0)
    odd = [*values]
    odd[2] = 90.0
    odd[250] += 20
    assert find_regimes(odd) == find_regimes(values)
