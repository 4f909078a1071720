"""Fixtures and helpers: commands run in this process, and runs that take seconds."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

import eval as eval_script
import train as train_script
from reproduction.config import Config, Dataset
from reproduction.data import sources
from reproduction.data.sources import Data, opened
from reproduction.reporting import report
from reproduction.runs.compose import compose
from reproduction.runs.folder import RunFolder
from reproduction.runs.parse import parse
from reproduction.start.command import run
from reproduction.start.resolve import resolve
from reproduction.system.errors import STOP_SIGNALS
from reproduction.training import ranks
from reproduction.training.run import run_training
from reproduction.training.step import Trainer
from scripts import export as export_script

ROOT = Path(__file__).parents[2]
# A run of seconds: a shallow, narrow CCT on a few digits, otherwise the defaults.
SMALL = [
    "model.embed_dim=16",
    "dataset.limit=60",
    "recipe.batch_size=20",
    "recipe.epochs=2",
    "recipe.log_every=2",
    "checkpoint.every_epochs=1",
    "device=cpu",
]
SMALL_VIT = ["model.architecture=test_vit", "model.depth=6"]  # timm's own test model, width 64


class CommandResult(NamedTuple):
    """The exit status and output of a command."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.err.splitlines()


Command = Callable[..., CommandResult]


# script -> its functions resolve, check_all, main and, for sweeps, conclude
SCRIPTS: dict[str, tuple[Any, ...]] = {
    "train": (
        *(train_script.resolve, train_script.check_all, train_script.main),
        train_script.conclude,
    ),
    "eval": (eval_script.resolve_evaluation, eval_script.check_all, eval_script.main),
    "export": (export_script.resolve_export, export_script.check_all, export_script.main),
}


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Command:
    """`command("train", *args)` runs train.py in the empty folder `tmp_path`.

    Reports have figures only in tests marked `draws`.
    """
    monkeypatch.chdir(tmp_path)
    if request.node.get_closest_marker("draws") is not None:
        monkeypatch.setattr(report, "_draw", _draw)

    def call(script: str, *args: str) -> CommandResult:
        status = run_here(monkeypatch, script, *args)
        return CommandResult(status, *capfd.readouterr())

    return call


def load_source(
    name: str, root: str | None, limit: int | None, eval_limit: int | None = None, **more: Any
) -> Data:
    """Opens a data set; the settings that do not change its images have any value."""
    others: dict[str, Any] = {
        "mean": [0.0] * 3,
        "std": [1.0] * 3,
        "workers": 0,
        "memory_mib": None,
        "source": f"{sources.__name__}:{name}",
    }
    return opened(
        Dataset(name=name, root=root, limit=limit, eval_limit=eval_limit, **others | more)
    )


def run_here(patch: pytest.MonkeyPatch, script: str, *args: str) -> int:
    """Runs a script in this process and returns its exit status.

    Ranks are forked, which saves their imports. Spawned ranks, as users get, have their own tests.
    """
    patch.setattr(sys, "argv", [str(ROOT / f"{script}.py"), *args])
    patch.setattr(ranks, "START_METHOD", "fork")
    patch.setattr(ranks, "_new_rank", _on_forked_rank)
    with pytest.raises(SystemExit) as end:
        run(script, *SCRIPTS[script])
    return int(end.value.code or 0)


def _goes_by_doors(module: Any) -> bool:
    """Whether a module of tests starts programs by tests/doors.py, which needs none of these."""
    names = (getattr(x, "func", x) for x in vars(module).values())
    return any(getattr(x, "__module__", "") == "tests.doors" for x in names)


@pytest.fixture(scope="module", autouse=True)
def no_pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skips the figures of reports, which take longer than a small run."""
    with pytest.MonkeyPatch.context() as patch:
        if not _goes_by_doors(request.module):
            patch.setattr(report, "_draw", lambda folder, config: [])
        yield


@pytest.fixture(scope="module", autouse=True)
def few_digits(request: pytest.FixtureRequest) -> Iterator[None]:
    """Evaluates 60 of the 360 held-out digits, as evaluation is half of a small run's time.

    Modules marked `all_digits` evaluate all: they compare with runs in other processes.
    """
    train, held_out = sources.digits()
    marked = request.node.get_closest_marker("all_digits") is not None
    with pytest.MonkeyPatch.context() as patch:
        if not marked and not _goes_by_doors(request.module):
            patch.setattr(sources, "digits", lambda: [train, held_out[:60]])
        sources._whole.cache_clear()
        yield
        sources._whole.cache_clear()


_draw = report._draw
_on_spawned_rank = ranks._new_rank


def _on_forked_rank(*args: Any) -> Any:
    """Resets the signal handlers that a forked rank inherits from the launcher."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in STOP_SIGNALS:
        if signum != signal.SIGINT:
            signal.signal(signum, signal.SIG_DFL)
    return _on_spawned_rank(*args)


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    """Calls `action` when `step` steps are completed, also in forked ranks."""
    original = Trainer.train_step

    def train_step(self: Trainer, *args: Any) -> Any:
        if self.step == step:
            action()
        return original(self, *args)

    monkeypatch.setattr(Trainer, "train_step", train_step)


def config_of(*overrides: str, needs_data: bool = True) -> Config:
    """Composes and checks the configuration of a train.py command line."""
    return parse(compose("train", list(overrides)).raw, needs_data=needs_data)


def trained_run(root: Path, *overrides: str) -> RunFolder:
    """Trains a run in this process and returns its folder, root/undisturbed."""
    run_training(resolve(compose("train", ["name=undisturbed", f"output_root={root}", *overrides])))
    return RunFolder(root / "undisturbed")


def write_images(
    root: Path, classes: list[str], train: int, held_out: int, size: int = 32, test: int = 0
) -> Path:
    """Writes images whose brightness encodes the class to root/train, val and, if any, test."""
    sources._whole.cache_clear()  # older versions of pytest use the path of a folder again
    rng = np.random.default_rng(0)
    for split, number in (("train", train), ("val", held_out), ("test", test)):
        for label, name in enumerate(classes if number else ()):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(number):
                noise = rng.integers(0, 60, (size, size + 8, 3))
                pixels = noise + 190 * label // max(1, len(classes) - 1)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    return root


def snapshot(folder: Path) -> dict[str, object]:
    """Maps every path under a folder to its content or link target; does not follow links."""
    entries: dict[str, object] = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            if path.is_symlink():
                entries[str(path)] = os.readlink(path)
            else:
                entries[str(path)] = path.read_bytes() if path.is_file() else None
    return entries
