"""The files of a run: in which order they reach the disk, and who writes beside whom."""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from reproduction import errors
from reproduction.config import Checkpoint
from reproduction.folder import RunFolder
from reproduction.training.checkpoint import Clock
from tests.programs import SMALL, Run, train, trained

ONE = (SMALL, "name=mine", "resume=auto")


class Event(NamedTuple):
    """What a run lets the system do with a file: `flush`, `move`, or `gone` for a last.pt."""

    kind: str
    path: str
    rest: str  # the bytes of one that is flushed, the target of one that is moved


class Noted(NamedTuple):
    events: list[Event]
    run: Run


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> Noted:
    """A run, and what it lets the system do with files."""
    fsync = os.fsync
    replace = os.replace
    events = []

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        events.append(Event("flush", path, str(os.stat(path).st_size)))

    def noted_replace(path: Any, target: Any) -> None:
        replace(path, target)
        events.append(Event("move", os.path.abspath(path), os.path.abspath(target)))
        if Path(path).name == "last.pt":
            events.append(Event("gone", os.path.abspath(path), ""))

    with (
        mock.patch.object(os, "fsync", noted_fsync),
        mock.patch.object(os, "replace", noted_replace),
    ):
        run = trained(ONE, root=tmp_path_factory.mktemp("noted"))
    return Noted(events, run)


def test_files_are_flushed_before_they_are_moved(noted: Noted):
    for before, event in pairwise(noted.events):
        assert event.kind != "gone"
        if event.kind == "move":
            assert before[:2] == ("flush", event.path), noted.events


def test_lines_are_flushed_before_the_checkpoint_that_records_their_size(noted: Noted):
    lines = str(noted.run.path / "metrics.jsonl")
    last = str(noted.run.path / "checkpoints/last.pt")
    flushed = [place for place, event in enumerate(noted.events) if event.path == lines]
    moved = [place for place, event in enumerate(noted.events) if event.rest == last]
    assert flushed[-1] < moved[-1]
    sizes = [int(noted.events[place].rest) for place in flushed]
    recorded = [noted.run.checkpoint(age)["metrics_size"] for age in (1, 0)]
    assert recorded == sizes[-2:]


def test_a_line_that_is_being_written_is_not_read(noted: Noted):
    folder = RunFolder(noted.run.path)
    lines = folder.read_metrics()
    with folder.metrics_path.open("a") as file:
        file.write('{"step": ')
    assert folder.read_metrics() == lines


def test_a_checkpoint_after_an_epoch_takes_a_twentieth_of_the_time(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    """One took 20 seconds, until 30."""
    (here / "checkpoints").mkdir()
    seconds = iter([0.0, 10.0, 30.0, 425.0, 435.0])
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    clock = Clock(Checkpoint())
    clock.save(RunFolder(here), {})
    assert not clock.is_due(epoch=1)
    assert clock.is_due(epoch=1)


def test_a_run_without_a_terminal_tells_how_far_it_is(here: Path, monkeypatch: pytest.MonkeyPatch):
    assert "epoch 1/2:" not in train(ONE).out
    monkeypatch.setattr(errors, "PULSE", 0.0)
    out = train(ONE, "output_root=other").out
    for place in ("epoch 1/2:  67%", "2/3", "epoch 2/2: 100%", "3/3"):
        assert place in out
