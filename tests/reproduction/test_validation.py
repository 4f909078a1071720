"""The validation split: which images, what a run evaluates when, and what its summary says."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reproduction.data.sources import report_other_files
from reproduction.runs.folder import RunFolder
from reproduction.studies.publish import publish
from reproduction.studies.runs import read_runs
from reproduction.studies.sweeps import runs_table
from reproduction.system.errors import UserError
from reproduction.training import evaluate as evaluation
from reproduction.training.epochs import Epochs
from tests.reproduction.conftest import SMALL, Command, load_source, write_images

SPLIT = [*SMALL, "dataset.validation=0.25", "recipe.epochs=4", "recipe.lr=0.02"]
TEST_KEYS = {"top1_last", "top5_last", "top1_selected", "top5_selected"}
VALIDATION_KEYS = {"val_top1_last", "val_top1_selected", "selected_epoch"}


def test_split_is_stratified_and_complete():
    every = load_source("digits", None, 200)
    source = load_source("digits", None, 200, validation=0.2)
    assert source.validation is source.per_epoch and len(source.held_out) == len(every.held_out)
    assert source.validation is not None
    counts = [np.bincount(part.targets) for part in (source.train, source.validation)]
    assert counts[0].tolist() == [16] * 10 and counts[1].tolist() == [4] * 10
    parts = [{x[i][0].tobytes() for i in range(len(x))} for x in (source.train, source.validation)]
    whole = {every.train[i][0].tobytes() for i in range(200)}
    assert parts[0] | parts[1] == whole and not parts[0] & parts[1]


def test_split_depends_on_its_own_seed_alone():
    first, again, other = (
        load_source("digits", None, 200, validation=0.2, validation_seed=seed).validation
        for seed in (0, 0, 1)
    )
    assert first is not None and again is not None and other is not None
    images = [[x[i][0].tobytes() for i in range(40)] for x in (first, again, other)]
    assert images[0] == images[1] != images[2]


def test_share_that_leaves_a_class_out_is_refused():
    with pytest.raises(
        UserError, match=r"^dataset\.validation=0\.01: must give images of every class: "
    ):
        load_source("digits", None, 20, validation=0.01)


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of images of all evaluations during training."""
    counts: list[int] = []
    original = evaluation.evaluate

    def evaluate(model: Any, normalize: Any, loader: Any, *args: Any) -> dict[str, float]:
        batches = [*loader]
        counts.append(sum(len(images) for images, _ in batches))
        return original(model, normalize, batches, *args)

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    yield counts


def test_test_set_is_evaluated_once_for_the_last_and_the_selected_epoch(
    command: Command, tmp_path: Path, evaluated: list[int]
):
    result = command("train", "name=run", *SPLIT)
    assert result.status == 0, result.err
    assert "on 45 images of digits, 10 classes, 60 held out, 15 for validation" in result.out
    assert evaluated == [15] * 4 + [60] * 2
    run = RunFolder(tmp_path / "outputs" / "run")
    summary, (_, epochs) = run.read_summary(), run.read_metrics()
    assert all(set(line) == {"epoch", "val_top1", "val_top5", "val_loss"} for line in epochs)
    best = max(epochs, key=lambda line: line["val_top1"])
    assert set(summary) >= TEST_KEYS | VALIDATION_KEYS
    assert summary["selected_epoch"] == best["epoch"] < 4, "choose another learning rate"
    assert summary["val_top1_selected"] == best["val_top1"]
    assert summary["val_top1_last"] == epochs[-1]["val_top1"]
    assert [summary[x] for x in ("top1_best", "top1_median10", "top5_best")] == [None] * 3
    for weights, word in (("last", "last"), ("best", "selected")):
        args = [f"run={run.path}", f"weights={weights}"]
        assert "on 60 images of digits" in command("eval", *args).out
        scores = json.loads((run.path / f"evaluation-{weights}.json").read_text())
        assert [summary[f"{x}_{word}"] for x in ("top1", "top5")] == [
            scores["top1"],
            scores["top5"],
        ]
    table = runs_table(read_runs(tmp_path / "outputs"))
    shown = table.shown().iloc[0]
    assert [shown[x] for x in ("last", "validation", "selected")] == [
        f"{summary[x]:.2f}" for x in ("top1_last", "val_top1_last", "top1_selected")
    ]
    assert "best" not in shown and "on the validation split, to choose by" in "".join(table.notes)
    with pytest.raises(UserError, match="has a validation split"):
        publish(run.path, tmp_path / "results")
    report = run.report_path.read_text()
    assert f"epoch {best['epoch']}, selected by validation: " in report


def test_selected_epoch_may_be_the_last(command: Command, tmp_path: Path, evaluated: list[int]):
    assert command("train", "name=run", *SPLIT, "recipe.epochs=1").status == 0
    assert evaluated == [15, 60]
    summary = RunFolder(tmp_path / "outputs" / "run").read_summary()
    assert summary["top1_last"] == summary["top1_selected"]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_run_that_ends_before_its_last_evaluation_resumes_alike(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int
):
    args = [*SPLIT, f"devices={devices}"]
    assert command("train", "name=whole", *args).status == 0
    original = Epochs.test

    def stopped(self: Epochs) -> Any:
        if devices > 1:
            raise RuntimeError("stopped")
        signal.raise_signal(signal.SIGTERM)
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Epochs, "test", stopped)
        assert command("train", "name=stopped", *args).status in (
            (1, 130) if devices > 1 else (130,)
        )
    assert RunFolder(tmp_path / "outputs" / "stopped").is_finished() is False
    assert command("train", "name=stopped", *args, "resume=auto").status == 0
    whole, again = (RunFolder(tmp_path / "outputs" / x) for x in ("whole", "stopped"))
    keys = TEST_KEYS | VALIDATION_KEYS
    assert {x: whole.read_summary()[x] for x in keys} == {x: again.read_summary()[x] for x in keys}
    assert whole.read_metrics()[1] == again.read_metrics()[1]
    assert whole.best_path.read_bytes() == again.best_path.read_bytes()


def test_folder_with_val_and_test_is_validated_on_val_and_tested_once(
    command: Command, tmp_path: Path, evaluated: list[int]
):
    root = write_images(tmp_path / "images", ["cat", "dog"], train=6, held_out=2, test=4)
    args = [
        *("name=run", "dataset=image_folder", f"dataset.root={root}", "model.image_size=16"),
        *("model.embed_dim=16", "recipe.batch_size=6", "recipe.epochs=1", "dataset.workers=0"),
    ]
    refused = command("train", *args, "dataset.validation=0.2")
    assert refused.status == 2 and refused.lines == [
        f"train.py: dataset.validation=0.2: {root}/val holds the images for validation, allowed is "
        "0"
    ]
    result = command("train", *args)
    assert "on 12 images of image_folder, 2 classes, 8 held out, 4 for validation" in result.out
    assert result.status == 0 and not result.err and evaluated == [4, 8]
    run = RunFolder(tmp_path / "outputs" / "run")
    summary = run.read_summary()
    assert set(summary) >= TEST_KEYS | VALIDATION_KEYS and summary["top1_best"] is None
    assert "on 8 images of image_folder" in command("eval", "run=outputs/run").out
    with pytest.raises(UserError, match="has a validation split"):
        publish(run.path, tmp_path / "results")


def test_test_folder_of_other_classes_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    root = write_images(tmp_path / "images", ["cat", "dog"], train=2, held_out=1, test=3)
    (root / "test" / "dog").rename(root / "test" / "unknown")
    source = load_source("image_folder", str(root), None)
    assert (len(source.held_out), source.validation) == (2, None)
    report_other_files(source)
    line = f"warning: {root}/test is not read, it has other classes than train/\n"
    assert capsys.readouterr().err == line


def test_evaluation_takes_no_split(command: Command):
    result = command("eval", "run=outputs/run", "dataset.validation=0.1")
    assert result.status == 2 and "dataset.validation=0.1: not allowed here" in result.err
