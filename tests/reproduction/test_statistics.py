"""Statistics of the tables, compared with values by hand and with scipy."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from reproduction.reporting.statistics import compare, holm, spread


def test_spread_of_three_values():
    result = spread([1.0, 2.0, 6.0])
    assert (result.mean, result.n) == (3.0, 3)
    assert result.std == pytest.approx(math.sqrt(7))  # (4 + 1 + 9) / 2


def test_spread_of_one_value_has_no_deviation():
    assert spread([82.5]).std is None


def test_spread_refuses_no_values():
    with pytest.raises(ValueError, match="no values"):
        spread([])


def test_compare_is_students_paired_test():
    """Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3)."""
    result = compare({0: 81.0, 1: 83.0, 2: 84.0}, {0: 80.0, 1: 81.0, 2: 81.0})
    assert result.difference == pytest.approx(2.0)
    assert result.t == pytest.approx(2 * math.sqrt(3))
    assert result.p == pytest.approx(2 * student.sf(2 * math.sqrt(3), df=2))
    assert result.reason is None


def test_compare_pairs_by_seed_and_drops_the_others():
    ours = {7: 90.0, 2: 84.0, 0: 81.0, 1: 83.0}
    baseline = {1: 81.0, 0: 80.0, 2: 81.0, 9: 10.0}
    result = compare(ours, baseline)
    assert result.seeds == (0, 1, 2)
    assert result == compare({0: 81.0, 1: 83.0, 2: 84.0}, {0: 80.0, 1: 81.0, 2: 81.0})


def test_compare_is_two_sided():
    ours, baseline = {0: 81.0, 1: 83.0}, {0: 80.0, 1: 81.0}
    there, back = compare(ours, baseline), compare(baseline, ours)
    assert there.p == pytest.approx(back.p)
    assert there.t == pytest.approx(-back.t)


@pytest.mark.parametrize(
    ("ours", "baseline", "difference", "reason"),
    [
        ({0: 81.0}, {0: 80.0}, 1.0, "needs 2 common seeds, has 1"),
        ({0: 81.0, 1: 82.0}, {2: 80.0, 3: 80.0}, None, "needs 2 common seeds, has 0"),
        ({0: 81.0, 1: 82.0}, {0: 81.0, 1: 82.0}, 0.0, "values are identical"),
        ({0: 80.1, 1: 80.4}, {0: 80.0, 1: 80.3}, 0.1, "all differences are equal"),
    ],
)
def test_compare_states_why_there_is_no_p(ours, baseline, difference, reason):
    result = compare(ours, baseline)
    assert (result.t, result.p, result.reason) == (None, None, reason)
    assert result.difference == (None if difference is None else pytest.approx(difference))


def test_holm_multiplies_by_the_remaining_tests():
    """0.01 x 3; 0.02 x 2; 0.03 x 1 is raised to the previous 0.04; no value exceeds 1."""
    assert holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([0.04]) == [0.04] and holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=6), st.floats(0.001, 0.999))
def test_holm_equals_the_step_down_procedure(p_values, level):
    """Holm (1979): in order of rising p, reject while p_(k) <= level / (m - k + 1)."""
    rejected: set[int] = set()
    for rank, test in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[test] * (len(p_values) - rank) > level:
            break
        rejected.add(test)
    assert {test for test, p in enumerate(holm(p_values)) if p <= level} == rejected
