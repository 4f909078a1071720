"""Progress: a bar on a terminal, elsewhere a line a minute."""

import errno
import io
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from reproduction.data.images import ArrayImages, FileImages, cache_in_memory
from reproduction.system.progress import Progress
from tests.reproduction.conftest import Command, write_images
from tests.reproduction.test_training import SMALL


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every reading of the clock is 25 seconds after the one before."""
    now = [0.0]

    def tick() -> float:
        now[0] += 25.0
        return now[0]

    monkeypatch.setattr(time, "monotonic", tick)
    return now


def test_without_a_terminal_a_line_a_minute_tells_the_time_left(
    capsys: pytest.CaptureFixture[str], slow_clock: list[float]
):
    assert [*Progress().over(range(1000, 1007), "epoch 2/3", 2007, 2000)] == [*range(1000, 1007)]
    assert capsys.readouterr().out.splitlines() == [
        "epoch 2/3: 2,003 of 2,007, 0:01:40 left",
        "epoch 2/3: 2,006 of 2,007, 0:00:25 left",
    ]
    assert [*Progress(active=False).over(range(7), "silent", 7)] == [*range(7)]
    assert capsys.readouterr().out == ""


def test_a_terminal_shows_a_bar_that_goes_away(
    monkeypatch: pytest.MonkeyPatch, slow_clock: list[float]
):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    progress = Progress()
    for task in ("epoch 1/2", "evaluation"):
        for item in progress.over("abc", task, 3):
            assert item in "abc"
            progress.bar.refresh()
        progress.line(f"{task} is over")
    shown = terminal.getvalue()
    assert "epoch 1/2" in shown and "evaluation" in shown and "2/3" in shown
    assert shown.rstrip().endswith("evaluation is over") and not progress.bar.tasks


def test_a_terminal_that_is_gone_ends_no_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with (tmp_path / "terminal").open("w") as file:

        class Gone(Terminal):
            def write(self, text: str) -> int:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            def fileno(self) -> int:
                return file.fileno()

        monkeypatch.setattr("sys.stdout", Gone())
        monkeypatch.setenv("TERM", "xterm")
        progress = Progress()
        for _ in progress.over("abc", "epoch 1/2", 3):
            progress.bar.refresh()
        progress.line("a line")
        progress.close()
    assert not progress.bar.tasks


def test_decoding_a_folder_tells_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], slow_clock: list[float]
):
    root = write_images(tmp_path, ["a", "b"], 4, 1, size=8) / "train"
    images = FileImages([(str(path), 0) for path in sorted(root.rglob("*.png"))], False)
    cached = cache_in_memory(images, 10, 1)
    assert isinstance(cached, ArrayImages) and len(cached) == 8
    assert np.array_equal(np.array(cached[3][0]), np.array(images[3][0]))
    assert capsys.readouterr().out.startswith("decoding images: 3 of 8, 0:02:05 left\n")


def test_a_run_tells_its_progress_and_what_it_trains(command: Command, slow_clock: list[float]):
    args = ["name=mine", "augmentation=[]", "checkpoint.every_minutes=null", *SMALL]
    result = command("train", *args)
    assert result.status == 0, result.err
    first, *lines = result.out.splitlines()
    assert first.startswith("training: cct_2_3x2 on 60 images of digits, 10 classes, 60 held out")
    for task in ("epoch 1/2", "evaluation"):
        assert any(re.match(rf"{task}: [123] of 3, 0:\d\d:\d\d left", line) for line in lines)
    ends = [line for line in lines if line.startswith("epoch") and "loss" in line]
    assert [line.endswith(" left]") for line in ends] == [True, False]
