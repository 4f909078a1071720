"""The end of an epoch is saved if that costs little."""

import signal
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from reproduction.config import Checkpoint
from reproduction.runs.folder import RunFolder
from reproduction.system.errors import Stopped
from reproduction.training import endings, saving
from reproduction.training.distributed import World
from reproduction.training.endings import Agreement
from reproduction.training.saving import Saver
from tests.reproduction.conftest import SMALL, Command


def test_an_epoch_is_saved_if_a_checkpoint_takes_a_twentieth_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
):
    now = [100.0]
    monkeypatch.setattr(saving.time, "monotonic", lambda: now[0])
    saver = Saver(Checkpoint())
    assert saver.is_due(1)  # nothing is known yet
    saver.write(partial(now.__setitem__, 0, 102.0))
    assert saver.seconds == 2.0
    now[0] = 139.0
    assert not saver.is_due(3)
    now[0] = 140.0
    assert saver.is_due(4)
    assert [epoch for epoch in range(1, 7) if Saver(Checkpoint(every_epochs=3)).is_due(epoch)] == [
        3,
        6,
    ]


def test_a_request_at_the_end_of_an_epoch_is_not_lost(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Several ranks agree on a request one step later, which may be after the last of an epoch."""
    monkeypatch.setattr(saving, "SHARE", 0.0)
    saved, calls = list[int](), count(1)

    def to_save(agreement: Agreement, is_late: bool) -> bool:
        return next(calls) % 4 == 0  # after each epoch of three steps

    monkeypatch.setattr(Agreement, "to_save", to_save)
    monkeypatch.setattr(RunFolder, "sync_metrics", lambda folder: saved.append(len(saved)))
    args = ["name=mine", *SMALL, "recipe.epochs=4", "checkpoint.every_epochs=null"]
    assert command("train", *args).status == 0
    assert len(saved) == 4


def test_a_run_saves_its_first_epoch_and_its_last(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(saving, "SHARE", 0.0)  # any checkpoint takes too long
    saved: list[int] = []
    monkeypatch.setattr(RunFolder, "sync_metrics", lambda folder: saved.append(len(saved)))
    args = ["name=mine", *SMALL, "recipe.epochs=4", "checkpoint.every_epochs=null"]
    assert command("train", *args).status == 0
    assert len(saved) == 2


class Ranks:
    """A fake all_reduce of two ranks that call it in turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.tensors: list[torch.Tensor] = []
        self.now = 0.0
        monkeypatch.setattr(endings.dist, "new_group", lambda backend: backend)
        monkeypatch.setattr(endings.dist, "all_reduce", self.all_reduce)
        monkeypatch.setattr(saving.time, "monotonic", lambda: self.now)

    def all_reduce(self, tensor: torch.Tensor, op: Any, group: Any, async_op: bool) -> "Ranks":
        self.tensors.append(tensor)
        return self

    def wait(self) -> None:
        """Reduces the pair after both ranks have called."""
        first = len(self.tensors) // 2 * 2 - 2
        pair = self.tensors[first : first + 2]
        most = torch.stack(pair).amax(dim=0)
        for tensor in pair:
            tensor.copy_(most)


def both_ranks(monkeypatch: pytest.MonkeyPatch) -> tuple[Ranks, list[Agreement]]:
    ranks = Ranks(monkeypatch)
    return ranks, [Agreement(World(rank, 2, torch.device("cpu"))) for rank in (0, 1)]


def test_ranks_save_one_step_after_a_minute_has_passed(monkeypatch: pytest.MonkeyPatch):
    ranks, both = both_ranks(monkeypatch)
    saver = Saver(Checkpoint(every_minutes=1.0))
    saved: list[list[int]] = [[], []]
    for step in range(1, 11):
        ranks.now = 21.0 * step
        for rank, agreement in enumerate(both):
            if agreement.to_save(rank == 0 and saver.is_late()):
                saved[rank].append(step)
        if saved[0][-1:] == [step]:
            saver.write(lambda: None)
    assert saved[0] == saved[1] == [4, 8]  # a minute has passed at steps 3 and 7


def test_ranks_stop_by_the_signal_to_one_of_them_even_if_another_is_late(
    monkeypatch: pytest.MonkeyPatch,
):
    _, (first, second) = both_ranks(monkeypatch)
    second.request_stop(signal.SIGTERM, None)
    assert [first.to_save(True), second.to_save(False)] == [False, False]
    for agreement in (first, second):
        with pytest.raises(Stopped) as stopped:
            agreement.to_save(False)
        assert stopped.value.signum == signal.SIGTERM
