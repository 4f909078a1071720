"""Small runs: run folders, resuming, interruptions, precision, sweeps, evaluation."""

import gc
import itertools
import json
import math
import re
import shlex
import shutil
import signal
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from reproduction.config import ROOT
from reproduction.data.loaders import EvaluationImages, TrainingImages
from reproduction.data.sources import _open
from reproduction.models.build import build_model
from reproduction.runs.compose import compose
from reproduction.runs.folder import RunFolder, find_runs
from reproduction.start.resolve import check_all, resolve, resolve_evaluation
from reproduction.studies.publish import publish
from reproduction.system.errors import STOP_SIGNALS
from reproduction.training.checkpoint import save_plain
from reproduction.training.history import accuracies, begun, best_epoch, is_best, top1_of
from reproduction.training.loop import Trainer
from tests.reproduction.conftest import (
    SMALL,
    SMALL_VIT,
    Command,
    at_step,
    config_of,
    trained_run,
    write_images,
)

STEP_KEYS = {
    "step",
    "epoch",
    "loss",
    "lr",
    "images_per_second",
    "mixed_samples",
    "mixed_tokens",
    "difficulty",
    "gain_max",
    "gain_mean",
}
SUMMARY_KEYS = {
    "top1_last",
    "top1_best",
    "top1_median10",
    "top5_last",
    "top5_best",
    "parameters",
    "macs",
    "seconds",
    "images_per_second",
    "threads",
    "seed",
    "versions",
    "git_revision",
    "status",
}
MIXED = [
    "augmentation=[mixup,cutmix,htm,vtm]",
    "augmentation.htm.tau=2.4",
    "recipe.transforms.erasing_prob=0.5",
]


def folder(tmp_path: Path, name: str = "mine") -> RunFolder:
    return RunFolder(tmp_path / "outputs" / name)


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "images_per_second"} for line in lines]


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    return torch.load(run.last_path, weights_only=True)["module"]


def assert_same_result(one: RunFolder, other: RunFolder) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    for lines, others in zip(one.read_metrics(), other.read_metrics(), strict=True):
        assert without_times(lines) == without_times(others)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException) -> None:
    """Raises `error` when `step` steps are completed."""

    def fail() -> None:
        raise error

    at_step(monkeypatch, step, fail)


def test_run_folder_has_metrics_summary_and_config(command: Command, tmp_path: Path):
    result = command("train", "name=mine", *MIXED, *SMALL)
    assert result.status == 0, result.err
    run = folder(tmp_path)
    steps, epochs = run.read_metrics()
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["epoch"] for line in steps] == [1, 1, 1, 2, 2, 2]
    assert all(set(line) == STEP_KEYS for line in steps)
    assert all(math.isfinite(value) for line in steps for value in line.values())
    assert any(line["mixed_samples"] > 0 for line in steps)
    assert all(line["mixed_samples"] <= 20 and line["mixed_tokens"] <= 64 for line in steps)
    assert [set(line) for line in epochs] == [{"epoch", "top1", "top5", "eval_loss"}] * 2
    summary = run.read_summary()
    assert set(summary) >= SUMMARY_KEYS
    assert summary["status"] == "finished"
    assert summary["top1_last"] == epochs[-1]["top1"]
    assert summary["top1_best"] == max(line["top1"] for line in epochs)
    assert summary["top1_median10"] == np.median([line["top1"] for line in epochs])
    config = yaml.safe_load(run.config_path.read_text())
    assert config["augmentation"]["htm"]["layer"] == 1
    assert config["recipe"]["epochs"] == 2
    assert "mine: top-1" in result.out
    assert "epoch 2/2" in result.out


@pytest.mark.draws
def test_run_without_htm_mixes_nothing(command: Command, tmp_path: Path):
    assert command("train", "name=mine", "augmentation=[]", *SMALL).status == 0
    steps, _ = folder(tmp_path).read_metrics()
    for line in steps:
        assert (line["mixed_samples"], line["mixed_tokens"]) == (0, 0)
        assert "difficulty" not in line
    assert not (folder(tmp_path).path / "mixed_pairs.png").exists()


@pytest.mark.draws
def test_report_shows_its_figures(command: Command, tmp_path: Path):
    mixing = ["augmentation.htm.tau=inf", "augmentation.htm.rho=0"]
    assert command("train", "name=mine", *mixing, *SMALL).status == 0
    path = folder(tmp_path).path
    page = (path / "report.md").read_text()
    for name in ("mixed_samples", "accuracy", "mixed_pairs", "saliency"):
        assert f"]({name}.png)" in page
        with Image.open(path / f"{name}.png") as picture:
            assert picture.width > 500
            assert np.asarray(picture.convert("L")).std() > 5
        assert (path / f"{name}.pdf").read_bytes()[:4] == b"%PDF"


def test_results_depend_on_the_seed_but_not_on_workers(
    command: Command, tmp_path: Path, uninterrupted: RunFolder
):
    for name, more in {"same": [], "workers": ["dataset.workers=2"], "seed": ["seed=1"]}.items():
        assert command("train", f"name={name}", *MIXED, *SMALL, *more).status == 0
    assert_same_result(folder(tmp_path, "same"), uninterrupted)
    assert_same_result(folder(tmp_path, "workers"), uninterrupted)
    key = "model.head.weight"
    assert weights(folder(tmp_path, "seed"))[key].ne(weights(uninterrupted)[key]).any()


@pytest.mark.parametrize("step", [1, 4])
def test_run_interrupted_within_a_step_resumes_from_its_last_epoch(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted, step: int
):
    with monkeypatch.context() as patch:
        interrupt_at(patch, step, KeyboardInterrupt())
        result = command("train", "name=mine", *MIXED, *SMALL)
    assert result.status == 130
    assert result.lines[-1].startswith("train.py: interrupted;")
    assert "outputs/mine is kept as interrupted" in result.lines[-1]
    assert "resume=auto" in result.lines[-1]
    assert folder(tmp_path).read_summary()["status"] == "interrupted"
    assert result.out.startswith("training: cct_2_3x2 on ")
    resumed = command("train", "name=mine", "resume=auto", *MIXED, *SMALL)
    assert resumed.status == 0
    expected = "training: " if step == 1 else "resuming after step 3: "
    assert resumed.out.startswith(f"{expected}cct_2_3x2 on 60 images of digits, 10 classes, "), (
        resumed.out
    )
    assert folder(tmp_path).read_summary()["status"] == "finished"
    assert_same_result(folder(tmp_path), uninterrupted)


@pytest.fixture(autouse=True)
def hear_ctrl_c() -> Iterator[None]:
    """Restores SIGINT, which shells ignore in background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def signal_in(monkeypatch: pytest.MonkeyPatch, step: int, *signals: signal.Signals) -> list[int]:
    """Raises signals in the step that follows `step` completed ones; returns the steps computed."""
    original, computed = Trainer.train_step, []

    def signalled_step(self: Trainer, *args: Any) -> Any:
        if self.step == step:
            for signum in signals:
                signal.raise_signal(signum)
        computed.append(self.step)
        return original(self, *args)

    monkeypatch.setattr(Trainer, "train_step", signalled_step)
    return computed


# in 2 epochs of 3 steps: within and at the end of epochs
@pytest.mark.parametrize(("step", "signum"), list(zip((0, 2, 4, 5, 1), STOP_SIGNALS, strict=True)))
def test_signal_ends_a_run_after_its_step_and_it_resumes_there(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted, step, signum
):
    with monkeypatch.context() as patch:
        first = signal_in(patch, step, signum)
        result = command("train", "name=mine", *MIXED, *SMALL)
    assert result.status == 130
    assert result.lines[-1].startswith("train.py: interrupted; outputs/mine is kept as interrupted")
    assert "\nstopping after this step (a second Ctrl-C: at once, without a" in result.out
    assert folder(tmp_path).read_summary()["status"] == "interrupted"
    with monkeypatch.context() as patch:
        second = signal_in(patch, -1)
        assert command("train", "name=mine", "resume=auto", *MIXED, *SMALL).status == 0
    assert first + second == list(range(6))
    assert_same_result(folder(tmp_path), uninterrupted)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained_run(tmp_path_factory.mktemp("uninterrupted"), *MIXED, *SMALL)


def test_run_stopped_in_its_last_step_only_evaluates_when_resumed(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    args = ("name=mine", "recipe.max_steps=2", *SMALL)
    computed = signal_in(monkeypatch, 1, signal.SIGUSR1)
    assert command("train", *args).status == 130
    assert command("train", *args, "resume=auto").status == 0
    assert computed == [0, 1]
    assert [len(lines) for lines in folder(tmp_path).read_metrics()] == [2, 1]


@pytest.mark.parametrize(
    ("images", "call", "lines"),
    [(TrainingImages, 0, [0, 0]), (TrainingImages, 4, [4, 1]), (EvaluationImages, 0, [3, 0])],
    ids=["the first batch", "a batch", "evaluation"],
)
def test_signal_ends_the_wait_for_a_batch_and_the_run_resumes_there(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: RunFolder,
    images: Any,
    call: int,
    lines: list[int],
):
    """The loader would wait for its image, as on a file system that hangs."""
    name = "__getitems__" if images is TrainingImages else "__getitem__"
    original, calls = getattr(images, name), itertools.count(-1 if images is TrainingImages else 0)

    def hang(self: Any, key: Any) -> Any:
        if next(calls) == call:  # the first call for training is that of the checks
            signal.raise_signal(signal.SIGTERM)
            time.sleep(1)
        return original(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(images, name, hang)
        result = command("train", "name=mine", *MIXED, *SMALL)
    assert result.status == 130 and "is kept as interrupted" in result.err
    assert [len(found) for found in folder(tmp_path).read_metrics()] == lines
    assert command("train", "name=mine", "resume=auto", *MIXED, *SMALL).status == 0
    assert_same_result(folder(tmp_path), uninterrupted)


def test_second_ctrl_c_ends_the_run_at_once(command: Command, tmp_path: Path, monkeypatch):
    computed = signal_in(monkeypatch, 4, signal.SIGINT, signal.SIGINT)
    assert command("train", "name=mine", *SMALL).status == 130
    assert computed == [0, 1, 2, 3]
    saved = torch.load(folder(tmp_path).last_path, weights_only=True)
    assert saved["step"] == 3


def test_signal_is_passed_to_the_previous_handler(command: Command, tmp_path: Path, monkeypatch):
    """A cluster's launcher handles signals to requeue its job."""
    seen = []

    def requeue(signum: int, frame: Any) -> None:
        seen.append((signum, folder(tmp_path).read_summary()["status"]))

    before = signal.signal(signal.SIGUSR1, requeue)
    try:
        signal_in(monkeypatch, 1, signal.SIGUSR1)
        assert command("train", "name=mine", *SMALL).status == 130
        assert signal.getsignal(signal.SIGUSR1) is requeue
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [(signal.SIGUSR1, "interrupted")]


def test_crash_is_recorded_and_named_in_the_last_line(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    interrupt_at(monkeypatch, 4, ZeroDivisionError("what\never"))
    result = command("train", "name=mine", *SMALL)
    assert result.status == 1
    assert "Traceback" in result.err
    assert result.lines[-1].startswith("train.py: ZeroDivisionError: what ever; outputs/mine")
    summary = folder(tmp_path).read_summary()
    assert summary["status"] == "failed"
    assert "ZeroDivisionError" in summary["error"]
    steps, epochs = folder(tmp_path).read_metrics()
    assert (len(steps), len(epochs)) == (4, 1)
    monkeypatch.undo()


def test_non_finite_loss_ends_the_run_and_names_the_step(command: Command, tmp_path: Path):
    diverge = ["recipe.lr=1e30", "recipe.warmup_lr=1e30", "recipe.clip_grad_norm=null"]
    result = command("train", "name=mine", "recipe.optimizer=sgd", *SMALL, *diverge)
    assert result.status == 1
    assert "train.py: step 2: the loss is nan" in result.lines[-1]
    assert folder(tmp_path).read_summary()["status"] == "failed"
    steps, _ = folder(tmp_path).read_metrics()
    assert [line["step"] for line in steps] == [1]


def test_divergence_in_the_last_step_fails_the_run(command: Command, tmp_path: Path):
    diverge = ["recipe.lr=1e37", "recipe.optimizer=sgd", "recipe.max_steps=1", "augmentation=[]"]
    result = command("train", "name=mine", *SMALL, *diverge)
    assert result.status == 1
    assert "the held-out loss is" in result.lines[-1]
    assert folder(tmp_path).read_summary()["status"] == "failed"
    assert not folder(tmp_path).best_path.exists()


def test_scorenet_learns_from_its_loss(command: Command, tmp_path: Path):
    for name, weight in (("learns", 0.001), ("idle", 0.0)):
        key = f"augmentation.htm.score_loss_weight={weight}"
        assert command("train", f"name={name}", key, "recipe.lr=0.01", *SMALL).status == 0
    for line in ("scorenets.1.head.weight", "scorenets.1.pool.weight"):
        learned, idle = (weights(folder(tmp_path, name))[line] for name in ("learns", "idle"))
        assert not torch.allclose(learned, idle, rtol=0.05)


@pytest.mark.parametrize(("tau", "is_warned"), [(2.2, False), (2.4, True), (float("inf"), False)])
def test_tau_above_the_loss_of_guessing_causes_a_warning(
    command: Command, tmp_path: Path, tau: float, is_warned: bool
):
    result = command("train", "name=mine", f"augmentation.htm.tau={tau}", *SMALL)
    assert result.status == 0, result.err
    assert ("guessing scores 2.30 nats" in result.err) == is_warned


def test_first_lines_and_summary_say_the_numbers_of_auto(command: Command, tmp_path: Path):
    result = command("train", "name=mine", *SMALL)
    assert "\nhtm: tau = 1\nhtm: rho = 0.02\n" in result.out  # 10 classes, 64 tokens
    assert folder(tmp_path).read_summary()["htm"] == {"tau": [1.0], "rho": [0.02]}
    assert folder(tmp_path).read_config()["augmentation"]["htm"]["tau"] == "auto"
    layers = [
        "augmentation=[htm]",
        "augmentation.htm.layer=[0,1]",
        "augmentation.htm.tau=[inf,auto]",
    ]
    result = command("train", "name=two", *layers, *SMALL)
    assert "htm: tau = inf, 1\nhtm: rho = 0.02, 0.02\n" in result.out
    assert folder(tmp_path, "two").read_summary()["htm"]["tau"] == ["inf", 1.0]
    assert command("train", "name=plain", "augmentation=[vtm]", *SMALL).status == 0
    assert "htm" not in folder(tmp_path, "plain").read_summary()


def test_low_precision_trains(command: Command, tmp_path: Path):
    result = command("train", "name=mine", *MIXED, *SMALL, "recipe.precision=bf16")
    assert result.status == 0, result.err
    steps, _ = folder(tmp_path).read_metrics()
    assert steps[-1]["loss"] < 5


def test_float16_on_a_cpu_is_refused_where_it_would_train_or_evaluate(
    command: Command, tmp_path: Path
):
    half = "recipe.precision=float16"
    result = command("train", "name=mine", *SMALL, half)
    assert (result.status, len(result.lines)) == (2, 1)
    assert f"{half}: takes minutes a batch on a CPU" in result.err
    assert "recipe.precision=float32" in result.err and not (tmp_path / "outputs").exists()
    check_all([resolve(compose("train", ["name=mine", *SMALL, half]))], here=False)  # to submit it
    assert command("train", "name=mine", *SMALL).status == 0
    run = folder(tmp_path)
    text = run.config_path.read_text()
    run.config_path.write_text(text.replace("precision: float32", "precision: float16"))
    refused = command("eval", "run=outputs/mine", "device=cpu")
    assert refused.status == 2 and f"eval.py: {half}: takes minutes" in refused.err
    allowed = command("eval", "run=outputs/mine", "device=cpu", "recipe.precision=float32")
    assert allowed.status == 0, allowed.err
    other = command("eval", "run=outputs/mine", "recipe.lr=1")
    assert "recipe.lr=1: not allowed here, allowed are run, weights" in other.err


def test_a_finished_run_is_not_extended_and_the_line_says_how_to_go_on(
    command: Command, tmp_path: Path
):
    assert command("train", "name=mine", *SMALL).status == 0
    result = command("train", "name=mine", "resume=auto", *SMALL, "recipe.epochs=5")
    (line,) = result.lines
    assert result.status == 2 and "recipe.epochs=5 instead of 2" in line
    best = "model.weights=outputs/mine/checkpoints/best.safetensors"
    assert "a finished run cannot be extended" in line and best in line
    assert command("train", "name=next", best, *SMALL, "recipe.epochs=1").status == 0


def test_sgd_with_clipping_trains(command: Command, tmp_path: Path):
    sgd = ["recipe.optimizer=sgd", "recipe.lr=0.1", "recipe.schedule_step=epoch"]
    assert command("train", "name=mine", *SMALL, *sgd).status == 0
    rates = [line["lr"] for line in folder(tmp_path).read_metrics()[0]]
    assert rates[0] == rates[2] == 0.1
    assert rates[3] < 0.1


def test_max_steps_ends_a_run_within_an_epoch(command: Command, tmp_path: Path):
    assert command("train", "name=mine", "recipe.max_steps=4", *SMALL).status == 0
    steps, epochs = folder(tmp_path).read_metrics()
    assert (len(steps), len(epochs)) == (4, 2)


def test_epoch_line_shows_the_means_of_its_batches(command: Command, tmp_path: Path):
    result = command("train", "name=mine", *MIXED, *SMALL, "recipe.log_every=2")
    steps, _ = RunFolder(tmp_path / "outputs" / "mine").read_metrics()
    for epoch in (1, 2):
        lines = [line for line in steps if line["epoch"] == epoch]
        samples = sum(line["mixed_samples"] for line in lines)
        tokens = sum(line["mixed_samples"] * line["mixed_tokens"] for line in lines) / samples
        loss = sum(line["loss"] for line in lines) / len(lines)
        line = (
            f"epoch {epoch}/2  loss {loss:.3f}  mixed {samples / len(lines):.1f} samples per batch"
        )
        assert f"{line} ({tokens:.1f} tokens each)" in result.out


def test_result_has_last_best_and_median_of_ten_epochs():
    top1 = [90.0, 80.0, 60.0, 20.0, 30.0, 40.0, 70.0, 5.0, 15.0, 25.0, 35.0, 45.0]
    epochs = [{**begun(i), "top1": x, "top5": x + 1} for i, x in enumerate(top1, 1)]
    result = accuracies(epochs)
    assert (result["top1_last"], result["top1_best"], result["top1_median10"]) == (45, 90, 32.5)
    assert (result["top5_last"], result["top5_best"]) == (46, 91)
    assert best_epoch(epochs) == 1
    for last, is_the_best in ((45.0, False), (90.0, False), (91.0, True)):
        epochs[-1]["top1"] = last
        assert is_best(top1_of(epochs)) == is_the_best  # the first of equal epochs stays the best
    every_fourth = [begun(i) | ({"top1": i, "top5": i} if i % 4 == 0 else {}) for i in range(1, 21)]
    assert accuracies(every_fourth)["top1_median10"] == 16


def test_evaluate_every_evaluates_also_after_the_last_epoch(command: Command, tmp_path: Path):
    few = ["recipe.epochs=5", "recipe.evaluate_every=2"]
    result = command("train", "name=mine", *SMALL, *few)
    steps, epochs = folder(tmp_path).read_metrics()
    assert [line["epoch"] for line in epochs] == [2, 4, 5]
    assert {line["epoch"] for line in steps} == {1, 2, 3, 4, 5}
    lines = [line for line in result.out.splitlines() if line.startswith("epoch")]
    assert ["top-1" in line for line in lines] == [False, True, False, True, True]
    assert folder(tmp_path).read_summary()["top1_best"] == max(line["top1"] for line in epochs)
    assert command("eval", f"run={folder(tmp_path).path}").status == 0


def test_off_epoch_stops_mixing_also_of_a_resumed_run(command: Command, tmp_path: Path):
    """In the last epoch the weights of ScoreNet do not change."""
    stack = "augmentation=[mixup,htm,vtm,manifold_mixup]"
    args = [stack, "augmentation.manifold_mixup.layers=[0]", "augmentation.htm.tau=inf", *SMALL]
    args += ["name=mine", "recipe.epochs=3", "checkpoint.keep=9"]
    assert command("train", *args, "augmentation.off_epoch=2").status == 0
    run = folder(tmp_path)
    steps, epochs = run.read_metrics()
    assert [line["mixed_samples"] > 0 for line in steps] == [True] * 6 + [False] * 3
    assert ["difficulty" not in line for line in steps] == [False] * 6 + [True] * 3
    assert len(epochs) == 3 and run.read_summary()["status"] == "finished"
    last, before, _ = (torch.load(path, weights_only=True) for path in run.checkpoints())
    for name, value in last["module"].items():
        is_unchanged = torch.equal(value, before["module"][name])
        assert is_unchanged == name.startswith("scorenets"), name
    run.last_path.unlink()  # falls back to the end of the second epoch
    run.summary_path.unlink()
    assert command("train", *args, "augmentation.off_epoch=2", "resume=auto").status == 0
    assert without_times(run.read_metrics()[0]) == without_times(steps)


def test_eval_gives_the_results_of_the_run(command: Command, tmp_path: Path):
    assert command("train", "name=mine", *SMALL).status == 0
    summary = folder(tmp_path).read_summary()
    last = command("eval", "run=outputs/mine")
    assert last.status == 0
    assert f"top-1 {summary['top1_last']:.2f} %" in last.out
    result = json.loads((folder(tmp_path).path / "evaluation-last.json").read_text())
    epoch = folder(tmp_path).read_metrics()[1][-1]
    assert result.items() >= epoch.items() and result["step"] == summary["steps"]
    assert "last.pt (step 6, 2 completed epochs): top-1" in last.out
    best = command("eval", "run=outputs/mine", "weights=best", "dataset.workers=1")
    assert f"top-1 {summary['top1_best']:.2f} %" in best.out
    other = shutil.copy(folder(tmp_path).best_path, tmp_path)
    for path in (folder(tmp_path).best_path, other):
        file = command("eval", f"checkpoint={path}", "model.embed_dim=16")
        assert f"top-1 {summary['top1_best']:.2f} %" in file.out
    assert len(list((tmp_path / "outputs/evaluations").glob("best-cct_2_3x2-digits-*.json"))) == 2


def test_eval_of_diverged_weights_fails(command: Command, tmp_path: Path):
    settings = ["model.embed_dim=16", "device=cpu"]
    model = build_model(config_of(*settings).model, 10)
    path = tmp_path / "diverged.safetensors"
    save_plain(path, {name: value * math.nan for name, value in model.state_dict().items()}, None)
    result = command("eval", f"checkpoint={path}", *settings)
    assert result.status == 1 and "the held-out loss is nan" in result.lines[-1]


def test_eval_of_other_images_keeps_the_runs_statistics(command: Command, tmp_path: Path):
    """Evaluates on one device by default, into separate files."""
    assert command("train", "name=mine", "dataset.mean=[0.4,0.4,0.4]", *SMALL).status == 0
    root = write_images(tmp_path / "images", ["dark", "light"], train=1, held_out=1)
    args = ["run=outputs/mine", "dataset=image_folder", f"dataset.root={root}"]
    evaluations = [
        resolve_evaluation(compose("eval", [*args, *more]))
        for more in ([], ["dataset.mean=[0.1,0.1,0.1]"], ["devices=2"])
    ]
    assert [x.config.dataset.mean[0] for x in evaluations] == [0.4, 0.1, 0.4]
    assert [x.config.devices for x in evaluations] == [1, 1, 2]
    assert len({x.result for x in evaluations}) == 2
    assert evaluations[0].result.name.startswith("evaluation-last-image_folder-")


def test_best_weights_hold_the_plain_model(command: Command, tmp_path: Path):
    assert command("train", "name=mine", *SMALL).status == 0
    run = folder(tmp_path)
    best = load_file(run.best_path)
    plain = {k.removeprefix("model.") for k in weights(run) if k.startswith("model.")}
    assert set(best) == plain
    assert not any("scorenet" in name for name in best)
    assert run.best_path.stat().st_mode == run.last_path.stat().st_mode  # both respect the umask


def test_image_folder_trains_and_evaluates_by_its_root(command: Command, tmp_path: Path):
    root = write_images(tmp_path / "images", ["dark", "grey", "light"], train=8, held_out=4)
    (root / "train" / "dark" / "notes.TXT").touch()
    small = [x for x in SMALL if "limit" not in x]
    result = command("train", "name=mine", "dataset=image_folder", f"dataset.root={root}", *small)
    assert result.status == 0, result.err
    assert "on 24 images of image_folder, 3 classes, 12 held out, htm+vtm" in result.out
    assert "warning: files left out by their ending: 1 .txt" in result.err
    evaluated = command("eval", "run=outputs/mine", "dataset.workers=0")
    assert "on 12 images of image_folder" in evaluated.out
    assert (folder(tmp_path).path / "evaluation-last.json").exists()
    root.rename(tmp_path / "others")
    evaluated = command("eval", "run=outputs/mine", f"dataset.root={tmp_path / 'others'}")
    assert evaluated.status == 0
    assert len(list(folder(tmp_path).path.glob("evaluation-last-image_folder-*.json"))) == 1
    assert publish(folder(tmp_path).path, tmp_path / "results").exists()


def test_resume_refuses_changed_images(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    root = write_images(tmp_path / "images", ["dark", "light"], train=12, held_out=4)
    args = ["name=mine", "dataset=image_folder", f"dataset.root={root}", *SMALL[:1], *SMALL[2:]]
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3, KeyboardInterrupt())
        assert command("train", *args).status == 130
    kept = (root / "train/dark/0.png").rename(tmp_path / "kept.png")
    _open.cache_clear()
    result = command("train", *args, "resume=auto")
    assert result.status == 2 and "images: 24 + 8 images of 2 classes, names" in result.lines[-1]
    summary = folder(tmp_path).read_summary()
    folder(tmp_path).summary_path.write_text(json.dumps(summary | {"data": None}))  # as of before
    result = command("train", *args, "resume=auto")
    assert (
        result.status == 2 and "was trained on 24 images, the data set has 23" in result.lines[-1]
    )
    kept.rename(root / "train/dark/0.png")
    for split in ("train", "val"):
        (root / split / "dark").rename(root / split / "night")
    _open.cache_clear()
    result = command("train", *args, "resume=auto")
    assert result.status == 2 and "was trained on the classes dark, light" in result.lines[-1]


@pytest.mark.slow
def test_a_tilde_is_the_home_folder_in_every_path(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(home := tmp_path / "home"))
    write_images(home / "images", ["dark", "light"], train=8, held_out=4)
    small = [*(x for x in SMALL if "limit" not in x), "output_root=~/o", "dataset.root=~/images"]
    small += ["dataset=image_folder", "dataset.workers=0"]
    assert command("train", "name=mine", *small).status == 0
    best, export = "~/o/mine/checkpoints/best.safetensors", "~/weights.safetensors"
    assert command("eval", "run=~/o/mine").status == 0
    assert command("eval", f"checkpoint={best}", "model.embed_dim=16", *small[-4:]).status == 0
    assert command("export", "run=~/o/mine", f"output={export}").status == 0
    assert command("export", f"checkpoint={export}", "output=~/x.safetensors").status == 2
    assert command("train", "name=again", f"model.weights={export}", *small).status == 0
    assert sorted(path.name for path in home.iterdir()) == ["images", "o", "weights.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_the_documented_commands_fine_tune_a_pretrained_vit(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "path/to/images", ["cat", "dog", "elk"], train=8, held_out=4)
    start = timm.create_model("test_vit", img_size=32).state_dict()
    save_file(start, "start.safetensors")
    page = (ROOT / "docs" / "training.md").read_text().replace("\\\n", "")
    section = page.partition("## Fine-tuning on your own images\n")[2].partition("\n## ")[0]
    section = section.replace(
        "model.pretrained=augreg_in21k_ft_in1k", "model.weights=start.safetensors"
    )
    small = [*SMALL_VIT, "model.image_size=32", "recipe.epochs=1", "device=cpu"]
    for script, line in re.findall(r"^python (?:scripts/)?(\w+)\.py (.*)$", section, re.M):
        result = command(script, *shlex.split(line), *(small if script == "train" else []))
        assert result.status == 0, result.err
    tuned = timm.create_model(
        "test_vit", num_classes=3, img_size=32, checkpoint_path="mine.safetensors"
    ).state_dict()
    change = (tuned["patch_embed.proj.weight"] - start["patch_embed.proj.weight"]).abs().max()
    assert 0 < change < start["patch_embed.proj.weight"].std() / 10
    assert tuned["head.weight"].shape == (3, 64)


def test_vit_trains_and_evaluates(command: Command, tmp_path: Path):
    vit = ["model=vit_tiny_patch16_224", *SMALL_VIT, "recipe.max_steps=2"]
    small = ["dataset.limit=10", "recipe.batch_size=5", "recipe.epochs=2", "device=cpu"]
    result = command("train", "name=mine", "model.image_size=32", *vit, *small)
    assert result.status == 0, result.err
    assert command("eval", "run=outputs/mine").status == 0
    steps, _ = folder(tmp_path).read_metrics()
    assert all(math.isfinite(line["loss"]) for line in steps)


@pytest.mark.slow
def test_sweep_writes_a_run_and_a_wandb_run_per_point_and_trains_each_once(
    command: Command, tmp_path: Path
):
    sweep = [
        "-m",
        "augmentation.htm.tau=0.5,2,inf",
        "logger=wandb",
        "logger.wandb.mode=offline",
        *SMALL,
    ]
    result = command("train", *sweep)
    assert result.status == 0, result.err
    runs = sorted(path for path in (tmp_path / "outputs").glob("cct*"))
    assert len(runs) == 3
    before = [(run / "metrics.jsonl").read_bytes() for run in runs]
    recorded = {path.name for run in runs for path in run.glob("wandb/offline-run-*")}
    assert len(recorded) == 3
    ids = {RunFolder(run).read_summary()["wandb_id"] for run in runs}
    assert len(ids) == 3
    again = command("train", *sweep, "resume=auto")
    assert again.status == 0, again.err
    assert again.out.count(": top-1 ") == 3
    assert "run 2 of 3: augmentation.htm.tau=2 " in again.out
    assert again.out.endswith("\n3 of 3 runs are finished\n")
    assert [(run / "metrics.jsonl").read_bytes() for run in runs] == before
    assert len(list((tmp_path / "outputs").glob("*/wandb/offline-run-*"))) == 3


def test_failing_point_does_not_stop_a_sweep(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    original, failed = Trainer.train_step, []

    def step(self: Trainer, *args: Any) -> Any:
        if self.config.seed == 1:
            failed.append(weakref.ref(self))
            raise RuntimeError("unlucky")
        if failed:
            gc.collect()  # the failed trainer's memory must be free
        assert all(trainer() is None for trainer in failed)
        return original(self, *args)

    monkeypatch.setattr(Trainer, "train_step", step)
    result = command("train", "-m", "seed=0,1,2", *SMALL)
    assert result.status == 1
    assert "RuntimeError: unlucky" in result.lines[-1]
    assert result.out.endswith("\n2 of 3 runs are finished\n")
    summaries = [RunFolder(p).read_summary() for p in (tmp_path / "outputs").glob("cct*")]
    assert sorted(s["status"] for s in summaries) == ["failed", "finished", "finished"]


def test_sweep_over_stacks_names_runs_after_them(command: Command, tmp_path: Path):
    result = command("train", "-m", "augmentation=[mixup],[mixup,cutmix,htm]", *SMALL)
    assert result.status == 0, result.err
    names = {path.name.partition("-embed_dim")[0] for path in (tmp_path / "outputs").glob("cct*")}
    assert names == {"cct_2_3x2-digits-mixup", "cct_2_3x2-digits-mixup+cutmix+htm"}
    for path in (tmp_path / "outputs").glob("cct*"):
        assert command("eval", f"run=outputs/{path.name}").status == 0  # its name has an "="


@pytest.mark.slow
def test_several_htm_layers_have_their_own_metrics_and_can_be_swept(
    command: Command, tmp_path: Path
):
    args = ["augmentation.htm.tau=[2.35,inf]", "augmentation.htm.rho=0", "augmentation.vtm.layer=1"]
    result = command("train", "-m", "augmentation.htm.layer=[0,1]", "seed=0,1", *args, *SMALL)
    assert result.status == 0, result.err
    first, second = find_runs(tmp_path / "outputs").values()
    assert first.read_config()["augmentation"]["htm"]["layer"] == [0, 1]
    for run in (first, second):
        steps, _ = run.read_metrics()
        for line in steps:
            assert line["mixed_samples"] == line["mixed_samples/1"] == 20 >= line["mixed_samples/0"]
            assert line["mixed_tokens"] >= max(line["mixed_tokens/0"], line["mixed_tokens/1"]) > 0
            each = [line["difficulty/0"], line["difficulty/1"]]
            assert line["difficulty"] == pytest.approx(sum(each) / 2)
    result = command("train", "-m", "augmentation.htm.layer=[0],0,[0,1]", *SMALL)
    assert result.status == 2 and "2 points of the sweep share this folder" in result.err
    assert command("train", "-m", "augmentation.htm.layer=[0],[0,1]", *SMALL).status == 0
