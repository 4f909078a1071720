"""Figure 4: where its regimes begin, and that a curve without them has none."""

import numpy as np
import pytest

from reproduction.reporting.regimes import Regimes, find_regimes

RNG = np.random.default_rng(0)


def curve(epochs: int, rise: int, slow: float, noise: float = 0.0) -> list[float]:
    """Few until `rise`, then abruptly 60 of 128, then 40 more with a time constant of `slow`."""
    after = np.maximum(np.arange(epochs) - rise, 0)
    values = np.where(np.arange(epochs) < rise, 4.0, 60 + 40 * (1 - np.exp(-after / slow)))
    return (values + noise * RNG.standard_normal(epochs)).tolist()


@pytest.mark.parametrize(("epochs", "rise"), [(1510, 12), (300, 6), (36, 3)])
@pytest.mark.parametrize("noise", [0.0, 0.8])
def test_the_boundaries_are_those_that_the_curve_was_made_with(epochs, rise, noise):
    slow = epochs / 8
    found = find_regimes(curve(epochs, rise, slow, noise))
    assert found.rise == rise
    settled = rise + slow * np.log(40 / (0.05 * 100))  # 40 exp(-x / slow) = 5 % of the level
    assert found.convergence == pytest.approx(settled, abs=0.08 * epochs)


def test_a_rise_that_takes_some_epochs_begins_at_a_fifth_of_its_way():
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
def test_a_curve_without_regimes_has_none(values: list[float]):
    assert find_regimes(values) == Regimes(None, None)


def test_a_rise_without_convergence_is_found_alone():
    growing = [2.0] * 5 + np.linspace(50, 100, 195).tolist()
    assert find_regimes(growing) == Regimes(5, None)


def test_a_slow_rise_that_settles_converges_without_an_abrupt_rise():
    slow = (100 * (1 - np.exp(-np.arange(400) / 80))).tolist()
    found = find_regimes(slow)
    assert found.rise is None and found.convergence == pytest.approx(240, abs=25)


def test_one_odd_epoch_moves_no_boundary():
    values = curve(300, 6, 30.0)
    odd = [*values]
    odd[2] = 90.0
    odd[250] += 20
    assert find_regimes(odd) == find_regimes(values)
