"""The comparison of two runs notices each difference but that of their speed."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from reproduction.runs.folder import RunFolder
from reproduction.training.checkpoint import save_last
from tests.chaos.runs import differences, last_state
from tests.reproduction.conftest import SMALL, trained_run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    root = tmp_path_factory.mktemp("chaos")
    return trained_run(root, *SMALL)


def change_lines(run: RunFolder, change: Callable[[list[str]], list[str]]) -> None:
    lines = run.metrics_path.read_text().splitlines()
    run.metrics_path.write_text("\n".join(change(lines)) + "\n")


def flip_last_bit(run: RunFolder) -> None:
    state = last_state(run)
    state["module"]["model.head.bias"].view(torch.int32)[0] ^= 1
    save_last(run.last_path, state)


HARMS: dict[str, tuple[Callable[[RunFolder], object], str]] = {
    "a bit": (flip_last_bit, "checkpoint: module.model.head.bias"),
    "best": (lambda run: run.best_path.write_bytes(b"other"), "best.safetensors"),
    "twice": (lambda run: change_lines(run, lambda x: [*x, x[-1]]), "3 lines of epochs for 2"),
    "loss": (
        lambda run: change_lines(run, lambda x: [x[0].replace('"loss": 2', '"loss": 3'), *x[1:]]),
        "line of batches",
    ),
    "result": (lambda run: run.write_summary(top1_last=0.0), "summary"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_differences_finds_every_harm(tmp_path: Path, undisturbed: RunFolder, harm: str):
    mine = RunFolder(shutil.copytree(undisturbed.path, tmp_path / "mine"))
    apply, message = HARMS[harm]
    apply(mine)
    first, *_ = differences(mine, undisturbed)
    assert message in first


def test_differences_ignores_speed(tmp_path: Path, undisturbed: RunFolder):
    mine = RunFolder(shutil.copytree(undisturbed.path, tmp_path / "mine"))
    mine.write_summary(seconds=1e6, images_per_second=0.1)
    speed = re.compile(r'(?<="images_per_second": )[0-9.]+')
    change_lines(mine, lambda lines: [speed.sub(lambda x: "1" * len(x[0]), y) for y in lines])
    assert differences(mine, undisturbed) == []
