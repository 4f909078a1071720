"""Timing in turns after a warm-up, ratios and intervals."""

from collections.abc import Callable

import pytest

from scripts.benchmark import timing
from scripts.benchmark.steps import ratios
from scripts.benchmark.timing import WARM_UP_ROUNDS, spread_of, summarize, time_in_turns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that advances only by `clock(seconds)`."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_time_in_turns_lets_each_work_follow_every_other():
    order: list[str] = []
    works = {name: lambda name=name: order.append(name) for name in "abc"}
    times = time_in_turns(works, 20)
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert len(rounds) == WARM_UP_ROUNDS + 20
    assert {"".join(sorted(each)) for each in rounds} == {"abc"}
    assert {each[:2] for each in rounds} == {"ab", "ac", "ba", "bc", "ca", "cb"}
    assert {name: len(ms) for name, ms in times.items()} == dict.fromkeys("abc", 20)


def test_time_in_turns_averages_over_calls(clock):
    assert time_in_turns({"a": lambda: clock(0.002)}, 2, calls=5) == {"a": pytest.approx([2, 2])}


def test_time_in_turns_drops_warm_up_rounds(clock):
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        clock(9.0 if len(calls) <= WARM_UP_ROUNDS else 0.002)

    assert time_in_turns({"a": work}, 2) == {"a": pytest.approx([2.0, 2.0])}


def test_ratios_are_taken_within_each_round():
    """The machine becomes slower in every round, but ratios stay constant."""
    speed = [1.0, 2.0, 4.0]
    rows = ratios({"plain": speed, "plain, again": speed, "HTM": [3 * x for x in speed]})
    assert rows["plain"]["ratio"] == {"median": 1, "low": 1, "high": 1, "interval": [1, 1]}
    assert rows["HTM"]["ratio"] == {"median": 3, "low": 3, "high": 3, "interval": [3, 3]}
    assert rows["plain"]["ms"]["interval"] == [1, 4]


def test_ratios_are_to_the_mean_of_both_plain_steps_that_are_compiled_alike():
    times = {"plain": [1.0], "plain, again": [3.0], "HTM": [4.0]}
    how = ", compile=true"
    compiled = {f"plain{how}": [1.0], f"plain{how}, again": [1.0], f"HTM{how}": [5.0]}
    rows = ratios({**times, **compiled, "HTM, compile=x": [1.0]})
    assert [row["ratio"]["median"] for row in [*rows.values()][:6]] == [1, 3, 2, 1, 1, 5]
    assert "ratio" not in rows["HTM, compile=x"]


def test_summary_interval_holds_the_median_and_narrows_with_rounds():
    few, many = summarize([*range(11)]), summarize([*range(11)] * 40)
    assert few["interval"][0] < few["low"] <= many["interval"][0] <= many["median"] == 5
    assert many["interval"][1] < few["interval"][1]
    assert summarize([2.0, 1.0])["interval"] == [1, 2]


def test_spread_of_gives_median_and_quartiles():
    assert spread_of([5, 1, 2, 4, 3]) == (3.0, 2.0, 4.0)
