"""Statistics of the tables against numbers worked out by hand and against scipy."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from reproduction.reporting.statistics import compare, holm, spread


def test_spread_of_three_values():
    found = spread([1.0, 2.0, 6.0])
    assert (found.mean, found.n) == (3.0, 3)
    assert found.std == pytest.approx(math.sqrt(7))  # (4 + 1 + 9) / 2


def test_spread_of_one_value_has_no_deviation():
    assert spread([82.5]).std is None


def test_spread_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no values"):
        spread([])


def test_compare_is_students_paired_test():
    """Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3)."""
    found = compare({0: 81.0, 1: 83.0, 2: 84.0}, {0: 80.0, 1: 81.0, 2: 81.0})
    assert found.difference == pytest.approx(2.0)
    assert found.t == pytest.approx(2 * math.sqrt(3))
    assert found.p == pytest.approx(2 * student.sf(2 * math.sqrt(3), df=2))
    assert found.reason is None


def test_compare_pairs_by_seed_and_drops_the_others():
    ours = {7: 90.0, 2: 84.0, 0: 81.0, 1: 83.0}
    baseline = {1: 81.0, 0: 80.0, 2: 81.0, 9: 10.0}
    found = compare(ours, baseline)
    assert found.seeds == (0, 1, 2)
    assert found == compare({0: 81.0, 1: 83.0, 2: 84.0}, {0: 80.0, 1: 81.0, 2: 81.0})


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
def test_compare_says_why_there_is_no_p(ours, baseline, difference, reason):
    found = compare(ours, baseline)
    assert (found.t, found.p, found.reason) == (None, None, reason)
    assert found.difference == (None if difference is None else pytest.approx(difference))


def test_holm_multiplies_by_the_tests_that_are_left():
    """0.01 x 3; 0.02 x 2; 0.03 x 1 may not fall below the 0.04 before it; none exceeds 1."""
    assert holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([0.04]) == [0.04] and holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=6), st.floats(0.001, 0.999))
def test_holm_rejects_what_the_step_down_procedure_rejects(p_values, level):
    """Holm (1979): by rising p, reject while p_(k) <= level / (m - k + 1)."""
    rejected: set[int] = set()
    for rank, test in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[test] * (len(p_values) - rank) > level:
            break
        rejected.add(test)
    assert {test for test, p in enumerate(holm(p_values)) if p <= level} == rejected
