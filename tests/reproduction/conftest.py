"""Command lines run in this process, and runs small enough for tests."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

import eval as eval_script
import train as train_script
from reproduction.commands.cli import run
from reproduction.config.schema import Config
from reproduction.runs.compose import compose
from reproduction.runs.parse import parse
from reproduction.studies.plan import Settings, point_configs
from reproduction.studies.speed import bare_trainer
from reproduction.training.loop import Trainer
from scripts import export as export_script
from tests.conftest import sharpened

# A run of seconds: a shallow, narrow CCT on a few digits, everything else as by default.
SMALL = [
    "model.embed_dim=16",
    "dataset.limit=60",
    "recipe.batch_size=20",
    "recipe.epochs=2",
    "recipe.log_every=2",
    "device=cpu",
]


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.err.splitlines()


Command = Callable[..., Ended]


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Command:
    """`command("train", *args)`: as typed in an empty folder, with runs under tmp_path/outputs.

    Reports go without pictures, which take longer than such a run, unless marked `draws`.
    """
    monkeypatch.chdir(tmp_path)
    if request.node.get_closest_marker("draws") is None:
        monkeypatch.setattr("reproduction.reporting.report._draw", lambda folder: {})

    def call(script: str, *args: str) -> Ended:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *args])
        with pytest.raises(SystemExit) as end:
            if script == "train":
                run("train", train_script.resolve, train_script.check_all, train_script.main)
            if script == "export":
                run(
                    "export", export_script.resolve, lambda settings, here: None, export_script.main
                )
            run("eval", eval_script.resolve, lambda settings, here: None, eval_script.main)
        out, err = capfd.readouterr()
        return Ended(int(end.value.code or 0), out, err)

    return call


@pytest.fixture(scope="module")
def unevaluated() -> Iterator[None]:
    """Epochs end without a look at the held-out images, which takes as long as training here."""
    with pytest.MonkeyPatch.context() as patch:
        told = {"top1": 10.0, "top5": 50.0, "eval_loss": 2.5}
        patch.setattr("reproduction.training.loop.evaluate", lambda *args: told)
        yield


@pytest.fixture(scope="session")
def configs() -> dict[str, Config]:
    """Of every cell, by its experiment, and value of a sweep, as `tau=2`: as the paper trained."""
    return point_configs("all", Settings())


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, happens: Callable[[], None]) -> None:
    """Lets something happen before the step that follows so many."""
    whole = Trainer.train_step

    def eventful_step(self: Trainer, *args: Any) -> Any:
        if self.step == step:
            happens()
        return whole(self, *args)

    monkeypatch.setattr(Trainer, "train_step", eventful_step)


def small_trainer(stack: list[str], *told: str, device: str = "cpu") -> Trainer:
    """Without images and files, of CCT-2/3x2 with sharp attention; HTM mixes every sample."""
    args = [f"augmentation=[{','.join(stack)}]", *told]
    args += ["augmentation.htm.tau=inf"] if "htm" in stack else []
    trainer = bare_trainer(parse(compose("train", args).raw), torch.device(device), classes=10)
    sharpened(trainer.module.model)
    return trainer


def write_images(root: Path, classes: list[str], train: int, held_out: int, size: int = 32) -> Path:
    """A folder of images whose brightness tells the class: root/train, root/val."""
    rng = np.random.default_rng(0)
    for split, number in (("train", train), ("val", held_out)):
        for label, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(number):
                noise = rng.integers(0, 60, (size, size + 8, 3))
                pixels = noise + 190 * label // max(1, len(classes) - 1)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    return root
