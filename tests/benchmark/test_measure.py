"""Timing in turns after a warm-up, ratios and intervals, and peak memory."""

from collections.abc import Callable

import pytest
import torch

from scripts.benchmark import timing
from scripts.benchmark.measure import compare, peak_mib, summarize
from scripts.benchmark.timing import WARM_UP, spread_of, time_in_turns

MEGABYTE = torch.zeros(1000, 250)


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
    assert len(rounds) == WARM_UP + 20
    assert {"".join(sorted(each)) for each in rounds} == {"abc"}
    assert {each[:2] for each in rounds} == {"ab", "ac", "ba", "bc", "ca", "cb"}
    assert {name: len(ms) for name, ms in times.items()} == dict.fromkeys("abc", 20)


def test_time_in_turns_averages_over_calls(clock):
    assert time_in_turns({"a": lambda: clock(0.002)}, 2, calls=5) == {"a": pytest.approx([2, 2])}


def test_time_in_turns_drops_warm_up_rounds(clock):
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        clock(9.0 if len(calls) <= WARM_UP else 0.002)

    assert time_in_turns({"a": work}, 2) == {"a": pytest.approx([2.0, 2.0])}


def test_compare_takes_ratios_per_round(clock):
    """The machine slows down every round, but ratios stay constant."""
    speed = [1.0]

    def plain() -> None:
        speed[0] *= 1.5
        clock(speed[0])

    rows = compare({"plain": plain, "both": lambda: clock(3 * speed[0])}, 6)
    assert list(rows) == ["plain", "plain, again", "both"]
    assert rows["plain"]["ratio"] == {"median": 1, "low": 1, "high": 1, "interval": [1, 1]}
    assert rows["plain"]["ms"]["high"] > 3 * rows["plain"]["ms"]["low"]
    assert rows["plain, again"]["ratio"]["median"] != 1


def test_compare_takes_ratios_to_the_mean_of_baseline_and_twin(clock):
    works = {"a": lambda: clock(1.0), "a, again": lambda: clock(3.0), "b": lambda: clock(4.0)}
    rows = compare(works, 3)
    assert [row["ratio"]["median"] for row in rows.values()] == [1, 3, 2]


def test_compare_adds_no_second_twin():
    calls: list[str] = []
    works = {name: lambda name=name: calls.append(name) for name in ("a", "a, again", "b")}
    assert list(compare(works, 2)) == ["a", "a, again", "b"]
    assert {name: calls.count(name) for name in works} == dict.fromkeys(works, WARM_UP + 2)


def test_summary_interval_holds_the_median_and_narrows_with_rounds():
    few, many = summarize([*range(11)]), summarize([*range(11)] * 40)
    assert few["interval"][0] < few["low"] <= many["interval"][0] <= many["median"] == 5
    assert many["interval"][1] < few["interval"][1]
    assert summarize([2.0, 1.0])["interval"] == [1, 2]


def test_spread_of_gives_median_and_quartiles():
    assert spread_of([5, 1, 2, 4, 3]) == (3.0, 2.0, 4.0)


def test_peak_mib_counts_simultaneous_allocations():
    def work() -> None:
        for _ in range(3):
            twice = MEGABYTE * 2
            del twice
        first = MEGABYTE + 1
        second = first + 1
        del first, second

    peak = peak_mib(work, torch.device("cpu"))
    assert 2_000_000 <= peak * 2**20 < 2_010_000


def test_peak_mib_ignores_earlier_allocations():
    assert peak_mib(lambda: MEGABYTE.add_(1), torch.device("cpu")) < 0.01
