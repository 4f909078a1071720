"""Runs that are killed or lose checkpoints end with the results of an undisturbed run."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from reproduction.runs.compose import compose
from reproduction.runs.folder import RunFolder
from reproduction.start.resolve import resolve
from reproduction.training import checkpoint, history, loop
from reproduction.training.checkpoint import load_last
from reproduction.training.train import run_training
from tests.reproduction.conftest import SMALL, Command
from tests.reproduction.test_training import MIXED, assert_same_result

# 2 epochs of 3 steps: checkpoints after steps 1, 2, 3, 3 (end of epoch), 4, 5, 6, 6 (evaluated).
PLAIN = "recipe.transforms.erasing_prob=0"  # so that the second epoch is the better one
SAVING = (*MIXED, PLAIN, *SMALL, "checkpoint.every_minutes=1e-6", "checkpoint.keep=3")
KILLED = 9


def train(root: Path, *more: str) -> RunFolder:
    args = (f"output_root={root}", "name=mine", "resume=auto", *SAVING, *more)
    run_training(resolve(compose("train", list(args))))
    return RunFolder(root / "mine")


@pytest.fixture(scope="module", autouse=True)
def better() -> Iterator[None]:
    """Makes every epoch the best so far, independently of the random numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "is_best", lambda top1: True)
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The undisturbed run."""
    return train(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def left(undisturbed: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy in the state that a kill after the last checkpoint leaves."""
    shutil.copytree(undisturbed.path, tmp_path / "outputs" / "mine")
    run = RunFolder(tmp_path / "outputs" / "mine")
    run.write_summary(status="running")
    return run


def assert_undisturbed(run: RunFolder, undisturbed: RunFolder) -> None:
    assert_same_result(run, undisturbed)
    best, expected = load_file(run.best_path), load_file(undisturbed.best_path)
    assert best.keys() == expected.keys()
    assert all(torch.equal(best[name], expected[name]) for name in best)
    assert not list(run.path.rglob("*.tmp"))
    assert run.read_summary()["status"] == "finished"


def steps_of(run: RunFolder) -> list[int]:
    return [torch.load(path, weights_only=True)["step"] for path in run.checkpoints()]


def killed(function: Callable[[], Any]) -> None:
    """Runs `function` in a process that `dying_at` ends at once, as SIGKILL does."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        try:
            function()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED


def dying_at(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, call: int) -> None:
    """Ends the process at the `call`-th call of a function."""
    original, calls = getattr(module, name), iter(range(1, 10**6))
    monkeypatch.setattr(
        module, name, lambda *args: os._exit(KILLED) if next(calls) == call else original(*args)
    )


def test_checkpoints_are_written_within_epochs_and_the_newest_are_kept(undisturbed: RunFolder):
    assert steps_of(undisturbed) == [6, 6, 5]
    states = [torch.load(path, weights_only=True) for path in undisturbed.checkpoints()]
    assert [state["epoch"] for state in states] == [2, 1, 1]
    assert [state["images"] for state in states] == [120, 120, 100]
    speed = 120 / states[0]["train_seconds"]
    assert undisturbed.read_summary()["images_per_second"] == pytest.approx(speed, abs=0.1)


def test_repeatedly_killed_run_equals_the_undisturbed_one(
    undisturbed: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, begun = RunFolder(tmp_path / "mine"), []
    for module, name, call in (
        (torch, "save", 1),  # metrics of steps 1 and 2 exist, but no checkpoint
        (os, "replace", 11),  # of step 4: earlier checkpoints are moved, last.pt is missing
        (checkpoint, "save", 2),  # the second epoch is evaluated, nothing of it saved
    ):
        with monkeypatch.context() as patch:
            dying_at(patch, module, name, call)
            killed(lambda: train(tmp_path))
        with run.metrics_path.open("a") as file:
            file.write('{"step": 5, "epo')  # cut short by the kill
        begun.append([path.name for path in run.checkpoints()])
        written = [line["step"] for line in run.read_metrics()[0]]
        assert written == list(range(1, len(written) + 1))
    assert begun == [
        [],
        ["last.pt", "last-1.pt", "last-2.pt"],
        ["last.pt", "last-1.pt", "last-2.pt"],
    ]
    assert_undisturbed(train(tmp_path), undisturbed)


def test_run_falls_back_to_the_newest_intact_checkpoint_and_its_best_weights(
    left: RunFolder, undisturbed: RunFolder, command: Command, monkeypatch: pytest.MonkeyPatch
):
    *broken, good = left.checkpoints()
    saved = torch.load(good, weights_only=True)
    for path in broken:
        path.write_bytes(path.read_bytes().replace(b"best", b"test"))
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "train_step", lambda *args: 1 / 0)
        result = command("train", "name=mine", "resume=auto", *SAVING)
    assert result.status == 1
    for name, line in zip(("last.pt", "last-1.pt"), result.lines, strict=False):
        assert line == (
            f"warning: checkpoint=outputs/mine/checkpoints/{name}: not readable: ValueError: "
            "damaged, the checksum of archive/data.pkl does not match; going back to last-2.pt"
        )
    assert left.checkpoints() == [left.last_path]
    best = load_file(left.best_path)  # not those of the second epoch, although written
    assert all(torch.equal(best[name], saved["best"][name]) for name in best)
    evaluated = command("eval", "run=outputs/mine", "weights=best")
    assert f"top-1 {saved['history']['epochs'][0]['top1']:.2f} %" in evaluated.out
    assert_undisturbed(train(left.path.parent), undisturbed)


def test_eval_warns_of_a_missing_checkpoint_and_uses_the_previous_one(
    left: RunFolder, command: Command
):
    left.last_path.unlink()
    result = command("eval", "run=outputs/mine")
    assert result.lines == [
        "warning: checkpoint=outputs/mine/checkpoints/last.pt: there is no such file; going back "
        "to last-1.pt"
    ]
    state = torch.load(left.checkpoints()[1], weights_only=True)
    epochs = "1 completed epoch" if state["epoch"] == 1 else f"{state['epoch']} completed epochs"
    place = f"(step {state['step']}, {epochs})"
    assert result.out.startswith(f"outputs/mine/checkpoints/last-1.pt {place}: top-1 ")


def test_load_last_skips_checkpoints_newer_than_the_metrics(
    left: RunFolder, capsys: pytest.CaptureFixture[str]
):
    _, before, _ = left.checkpoints()
    left.trim_metrics(torch.load(before, weights_only=True)["metrics_size"])
    newest = load_last(left)
    assert newest is not None and newest[0] == before
    err = capsys.readouterr().err
    assert (
        "metrics.jsonl: is shorter than when the checkpoint was written; going back to last-1"
        in err
    )


def test_run_without_readable_checkpoint_is_refused_unchanged(left: RunFolder, command: Command):
    for path in left.checkpoints():
        path.write_bytes(path.read_bytes()[:1000])
    before = {path: path.read_bytes() for path in left.path.rglob("*") if path.is_file()}
    result = command("train", "name=mine", "resume=auto", *SAVING)
    assert (result.status, len(result.lines)) == (2, 1)
    assert "last.pt: not readable" in result.err and "either: last-1.pt, last-2.pt" in result.err
    assert {path: path.read_bytes() for path in left.path.rglob("*") if path.is_file()} == before
    result = command("eval", "run=outputs/mine")
    assert (result.status, len(result.lines)) == (2, 1)
