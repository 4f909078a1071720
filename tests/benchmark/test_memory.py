"""Peak memory of work whose allocations are known."""

import torch

from scripts.benchmark.measure import peak_mib

MEGABYTE = torch.zeros(1000, 250)


def test_peak_counts_what_is_held_at_once():
    def work() -> None:
        for _ in range(3):
            twice = MEGABYTE * 2
            del twice
        first = MEGABYTE + 1
        second = first + 1
        del first, second

    held = peak_mib(work, torch.device("cpu"))
    assert 2_000_000 <= held * 2**20 < 2_010_000


def test_what_stood_before_is_not_counted():
    assert peak_mib(lambda: MEGABYTE.add_(1), torch.device("cpu")) < 0.01
