"""Command lines run in this process, and runs small enough for tests."""

import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

import eval as eval_script
import train as train_script
from reproduction.commands.cli import run
from reproduction.config import Config
from reproduction.data import sources
from reproduction.reporting import report
from reproduction.runs.compose import compose
from reproduction.runs.parse import parse
from reproduction.studies.plan import Settings, point_configs
from reproduction.studies.speed import bare_trainer
from reproduction.system.errors import STOP_SIGNALS
from reproduction.training import distributed
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
SMALL_VIT = ["model.architecture=test_vit", "model.depth=6"]  # 64 wide, as timm tests itself


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.err.splitlines()


Command = Callable[..., Ended]


def no_checks(settings: Any, here: bool) -> None:
    """What eval.py and export.py check of all points together."""


SCRIPTS: dict[str, tuple[Any, Any, Any]] = {
    "train": (train_script.resolve, train_script.check_all, train_script.main),
    "eval": (eval_script.resolve_evaluation, no_checks, eval_script.main),
    "export": (export_script.resolve_export, no_checks, export_script.main),
}


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Command:
    """`command("train", *args)`: as typed in an empty folder, with runs under tmp_path/outputs.

    Reports have pictures where marked `draws`.
    """
    monkeypatch.chdir(tmp_path)
    if request.node.get_closest_marker("draws") is not None:
        monkeypatch.setattr(report, "_draw", _draw)

    def call(script: str, *args: str) -> Ended:
        status = run_here(monkeypatch, script, *args)
        return Ended(status, *capfd.readouterr())

    return call


def run_here(patch: pytest.MonkeyPatch, script: str, *args: str) -> int:
    """The status of a script that is run in this process; its ranks are forks of it.

    So nothing is imported again. What a user starts, which spawns them, has tests of its own.
    """
    patch.setattr(sys, "argv", [f"{script}.py", *args])
    patch.setattr(distributed, "START_METHOD", "fork")
    patch.setattr(distributed, "_on_rank", _on_forked_rank)
    resolve, check_all, main = SCRIPTS[script]
    with pytest.raises(SystemExit) as end:
        run(script, resolve, check_all, main)
    return int(end.value.code or 0)


@pytest.fixture(scope="session", autouse=True)
def no_pictures() -> Iterator[None]:
    """Reports without pictures, which take longer than a small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_draw", lambda folder: [])
        yield


@pytest.fixture(scope="module", autouse=True)
def few_digits(request: pytest.FixtureRequest) -> Iterator[None]:
    """60 of the 360 held-out digits are evaluated, on which small runs spend half of their time.

    Not in modules marked `all_digits`, which compare with runs in processes of their own.
    """
    whole = sources._open

    def opened(name: str, root: str | None) -> sources.Source:
        source = whole(name, root)
        few = source.held_out.take(range(60)) if name == "digits" else source.held_out
        return replace(source, held_out=few)

    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("all_digits") is None:
            patch.setattr(sources, "_open", opened)
        yield


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


_draw = report._draw
_on_spawned_rank = distributed._on_rank


def _on_forked_rank(*args: Any) -> Any:
    """Without the launcher's handlers, which a fork has too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in STOP_SIGNALS:
        if signum != signal.SIGINT:
            signal.signal(signum, signal.SIG_DFL)
    return _on_spawned_rank(*args)


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, happens: Callable[[], None]) -> None:
    """Lets something happen before the step that follows so many, also in ranks."""
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
