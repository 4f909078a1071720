"""Runs that are stopped, killed or damaged end as undisturbed ones.

The runs read the images of tests/images.py, which let something happen at a chosen image.
"""

import shutil
import signal
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

from tests.conftest import settled, slow
from tests.images import OWN, SOURCE, disturbed
from tests.programs import (
    SHORT,
    Overrides,
    Result,
    Run,
    assert_refused,
    assert_same_lines,
    assert_succeeded,
    code_of_a_copy,
    evaluate,
    files_end_at,
    line_of,
    of_runs,
    overrides_of,
    planted,
    same,
    snapshot,
    statuses,
    train,
    trained,
)
from tests.rehearsal import rehearsed
from tokenmixup.assignment import Diverged

# Everything that has a state: 3 epochs of 3 batches of 19, in micro-batches of 7 or 6.
TRAINING = (
    OWN,
    overrides_of("""
        +dataset.options.train=57 recipe.grad_accum_steps=3 recipe.ema_decay=0.8
        augmentation=[mixup,cutmix,manifold_mixup,htm,vtm] augmentation.htm.tau=2.29
        augmentation.htm.rho=0 augmentation.manifold_mixup.layers=[0,1] model.attn_drop=0.1
        recipe.transforms.erasing_prob=0.5 recipe.lr=0.01 model.embed_dim=16 recipe.batch_size=20
        recipe.log_every=2 device=cpu recipe.epochs=3 resume=auto recipe.drop_last=false
    """),
)
BY_EPOCHS = (TRAINING, "name=mine", "checkpoint.every_epochs=1")
BY_STEPS = (TRAINING, "name=mine", "checkpoint.every_minutes=1e-6")
STEPS = 9


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The undisturbed run, with a checkpoint after each step."""
    return trained(BY_STEPS, root=tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run as a failure in its last epoch leaves it, with a checkpoint of the step before."""
    root = tmp_path_factory.mktemp("failed")
    with disturbed("fail", at=160):
        assert train(BY_STEPS, f"output_root={root}").status == 1
    run = Run(root / "mine")
    assert [run.checkpoint(age)["step"] for age in (0, 1)] == [8, 7]
    return run


@pytest.fixture
def left(here: Path, failed: Run) -> Run:
    shutil.copytree(failed.path, "outputs/mine")
    return Run("outputs/mine")


def ends_as(whole: Run, overrides: Overrides) -> None:
    """Lets the run go on, and compares it with the undisturbed one."""
    run = trained(overrides)
    assert same(run, whole) == []
    assert run.summary["status"] == "finished"
    assert not list(run.path.rglob("*.tmp"))


def test_checkpoints_are_written_within_epochs_and_the_newest_two_are_kept(whole: Run):
    states = [whole.checkpoint(age) for age in range(len(whole.checkpoints))]
    assert [(x["step"], x["epoch"]) for x in states] == [(STEPS, 3), (STEPS, 2)]


def test_checkpoints_are_written_after_every_so_many_epochs_and_the_last(here: Path):
    run = trained(OWN, SHORT, "augmentation=[]", "recipe.epochs=3", "checkpoint.every_epochs=2")
    assert [run.checkpoint(age)["epoch"] for age in (0, 1)] == [3, 2]


SIGNALS = {"SIGTERM": 3, "SIGUSR1": 45, "SIGHUP": 56, "SIGINT": 57}  # at which image


@pytest.mark.parametrize("overrides", [slow(BY_EPOCHS), BY_STEPS], ids=["by epochs", "by steps"])
def test_signals_end_a_run_after_a_step_and_it_resumes_there(
    here: Path, whole: Run, overrides: tuple[str, ...]
):
    """Within the first batch, in the middle and at the end of epochs."""
    done = 0
    for name, at in SIGNALS.items():
        with disturbed(name, at):
            result = train(overrides)
        run = Run("outputs/mine")
        assert_refused(result, "interrupted", "repeat the command to continue", status=130)
        assert run.summary["status"] == "interrupted"
        assert len(run.steps) >= done
        done = len(run.steps)
        assert done == 0 or run.checkpoint()["step"] == done == run.steps[-1]["step"]
    assert 0 < done < STEPS
    assert len(run.summary["starts"]) == len(SIGNALS)
    ends_as(whole, overrides)


def test_failures_are_recorded_and_named_in_a_last_line(here: Path, whole: Run):
    """A mistake in the code of a data set keeps its traceback above that line."""
    with disturbed("interrupt", at=70):
        result = train(BY_EPOCHS)
    told = ("interrupted", "outputs/mine", "repeat the command to continue")
    assert_refused(result, *told, status=130)
    assert statuses() == ["interrupted"]
    with disturbed("fail", at=30):
        result = train(BY_EPOCHS)
    assert result.status == 1
    assert "Traceback" in result.err
    for part in ("ZeroDivisionError: what", "outputs/mine", "repeat the command to continue"):
        assert part in result.lines[-1]
    assert statuses() == ["failed"]
    ends_as(whole, BY_EPOCHS)


def assert_ended_at(step: int, last: int, result: Result, run: Run, whole: Run) -> None:
    """Asserts that a run ended in one line at a step, and has a checkpoint after `last`, if any."""
    if last:
        kept = f"model.weights={run.path}/checkpoints/last.pt"
        assert run.checkpoint()["step"] == last
        assert_as_after(last, run)
    else:
        kept = "there is no checkpoint"
        assert not run.checkpoints
    assert_refused(result, f"step {step}: the ", kept, "kept as failed", status=1)
    assert_same_lines(run.steps, whole.steps[: step - 1], abs=0)


def assert_as_after(step: int, run: Run) -> None:
    """Asserts that a checkpoint is that of an undisturbed run of so many steps, bit for bit."""
    short = trained(TRAINING, f"recipe.max_steps={step}", name="short")
    ours, theirs = run.checkpoint(), short.checkpoint()
    for name in ("module", "model_ema"):
        assert_close(ours[name], theirs[name], atol=0, rtol=0)
    assert_close(ours["optimizer"]["state"], theirs["optimizer"]["state"], atol=0, rtol=0)


@pytest.mark.parametrize("kind", ["loss", slow("gradient")])
def test_a_run_ends_at_a_step_that_is_not_finite_and_repeats_it(here: Path, whole: Run, kind: str):
    """The fifth of nine; the sixth is made before the log is read. New runs begin from there."""
    run = Run("outputs/mine")
    seldom = "recipe.log_every=100"
    with disturbed(kind, at=1 + 57 + 20):  # the first image is read once more, before the run
        result = train(BY_EPOCHS, seldom)
    assert_ended_at(5, 3, result, run, whole)
    with disturbed(kind, at=1 + 20):
        assert train(BY_EPOCHS, seldom).err == result.err
    overrides = (f"model.weights={run.path}/checkpoints/last.pt", "recipe.lr=0.001")
    new = trained(TRAINING, overrides, name="new")
    assert f"{run.path}/checkpoints/last.pt" in str(new.summary["initial_weights"])
    ends_as(whole, BY_EPOCHS)


GRAPH = (OWN, SHORT, "compile=cuda-graph", "resume=auto", "recipe.ema_decay=0.8")


@pytest.mark.parametrize("kind", [slow("loss"), "gradient"])
def test_a_captured_run_ends_at_a_step_that_is_not_finite_and_resumes(
    here: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    """The fifth of six. On a CPU the steps run that a graph would replay."""
    monkeypatch.setattr("reproduction.training.run.resolve_device", lambda *asked: "cpu")
    monkeypatch.setattr("reproduction.training.trial.resolve_device", lambda *asked: "cpu")
    with rehearsed():
        whole = trained(GRAPH, name="whole")
        with disturbed(kind, at=1 + 60 + 20 + 1):
            result = train(GRAPH, "name=mine")
        run = Run("outputs/mine")
        assert_refused(result, "step 5: the ", f"model.weights={run.path}", status=1)
        assert run.checkpoint()["step"] == 3
        for tensor in tree_leaves(run.checkpoint()):
            assert not isinstance(tensor, torch.Tensor) or tensor.isfinite().all()
        ends_as(whole, (GRAPH, "name=mine"))


@pytest.mark.parametrize(("step", "last"), [(1, 0), slow(4, 3)])
def test_a_run_ends_at_its_first_step_or_that_of_an_epoch(
    here: Path, whole: Run, step: int, last: int
):
    with disturbed("gradient", at=1 + 19 * (step - 1) + 1):
        result = train(BY_EPOCHS, "recipe.log_every=100")
    assert_ended_at(step, last, result, Run("outputs/mine"), whole)
    ends_as(whole, BY_EPOCHS)


@pytest.mark.parametrize(
    ("overrides", "last"), [(BY_EPOCHS, 0), slow(BY_STEPS, 1)], ids=["a signal", "the clock"]
)
def test_no_checkpoint_is_of_a_step_that_is_not_finite(
    here: Path, whole: Run, overrides: tuple[str, ...], last: int
):
    """The signal comes before the log is read, the checkpoint is due after each step."""
    with disturbed("loss", at=1 + 20), disturbed("SIGTERM", at=1 + 45):
        result = train(overrides, "recipe.log_every=100")
    assert_ended_at(2, last, result, Run("outputs/mine"), whole)
    ends_as(whole, overrides)


def test_a_run_ends_at_saliency_that_is_not_finite(here: Path, whole: Run):
    """In a micro-batch of the fifth step, where the host matches."""
    calls = count(1)

    def check() -> None:
        if next(calls) == 3 * 4 + 2:
            raise Diverged("the saliency gain is not finite")

    with planted("gain", check):
        result = train(BY_EPOCHS, "recipe.log_every=100")
    assert_ended_at(5, 3, result, Run("outputs/mine"), whole)
    ends_as(whole, BY_EPOCHS)


@pytest.mark.parametrize(("at", "half"), [slow(30, "train"), (130, "train"), slow(50, "held_out")])
def test_a_killed_run_ends_as_an_undisturbed_one(here: Path, whole: Run, at: int, half: str):
    with disturbed("SIGKILL", at, half):
        assert code_of_a_copy(BY_STEPS) == -signal.SIGKILL
    run = Run("outputs/mine")
    written = [line["step"] for line in run.steps]
    assert written == list(range(1, len(written) + 1))
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "epo')  # cut short by the kill
    ends_as(whole, BY_STEPS)


def test_a_kill_while_a_checkpoint_is_written_loses_at_most_that_one(left: Run, whole: Run):
    """The one before it is moved already, last.pt is missing, a temporary file is left."""
    last, *_ = left.checkpoints
    last.rename(last.with_name(".last.pt.tmp"))
    result = evaluate("run=outputs/mine", SOURCE, "device=cpu")
    assert_succeeded(result, "last-1.pt")
    assert not result.err
    ends_as(whole, BY_STEPS)


def flipped(data: bytes) -> bytes:
    """The data with a bit flipped in a weight."""
    place = len(data) // 2
    return data[:place] + bytes([data[place] ^ 64]) + data[place + 1 :]


def cut(data: bytes) -> bytes:
    return data[:1000]


def empty(data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("change", [flipped, slow(cut), slow(empty)])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(left: Run, whole: Run, change: Any):
    """The best weights are again those of the checkpoint that the run goes back to."""
    broken, good = left.checkpoints
    data = broken.read_bytes()
    broken.write_bytes(change(data))
    best = left.path / "checkpoints" / "best.safetensors"
    saved = torch.load(good, weights_only=True)["best"]
    best.write_bytes(b"of a later epoch")
    with disturbed("interrupt", at=25):
        result = train(BY_STEPS)
    warning, _ = result.lines
    assert warning.startswith("warning: ")
    assert "last.pt" in warning
    torch.testing.assert_close(load_file(best), saved, atol=0, rtol=0)
    ends_as(whole, BY_STEPS)


def test_a_run_without_readable_checkpoint_is_refused_unchanged(left: Run):
    for path in left.checkpoints:
        path.write_bytes(path.read_bytes()[:1000])
    before = of_runs(snapshot())
    assert_refused(train(BY_STEPS), "last.pt")
    assert_refused(evaluate("run=outputs/mine", SOURCE, "device=cpu"), "last.pt")
    assert of_runs(snapshot()) == before


def test_a_full_disk_ends_a_run_in_one_line_and_it_resumes(here: Path, whole: Run):
    """Files end at 64 KiB: checkpoints are larger, metrics and messages are not."""
    with disturbed("SIGTERM", at=45):
        assert train(BY_STEPS).status == 130
    with files_end_at(2**16):
        result = train(BY_STEPS)
    assert_refused(result, "File too large", "outputs/mine", status=1)
    ends_as(whole, BY_STEPS)


CHOICES: dict[str, list[Any]] = {
    "model.depth": [2, 3],
    "model.pooling": ["sequence", "class_token"],
    "model.positional_embedding": ["learnable", "sine"],
    "model.checkpoint_blocks": ["true", "false"],
    "model.attn_drop": [0, 0.1],
    "augmentation.off_epoch": ["null", 1],
    "augmentation.mixup.prob": [1, 0.5],
    "augmentation.manifold_mixup.layers": ["[0]", "[0,1]"],
    "augmentation.htm.layer": [0, 1, [0, 1]],
    "augmentation.htm.tau": [0, 2.3, "inf"],
    "augmentation.htm.pooling": ["auto", "attention", "average"],
    "augmentation.htm.stop_gradient": ["true", "false"],
    "augmentation.htm.rollout_steps": [0, 0, 1],
    "augmentation.htm.detector": ["attention", "mean_attention", "gradient", "random"],
    "augmentation.htm.matching": ["optimal", "random"],
    "augmentation.htm.mask_rule": ["paper", "published"],
    "augmentation.htm.labels": ["saliency", "count"],
    "augmentation.htm.order": ["in_place", "published"],
    "augmentation.vtm.layer": [1, 1, "[1,2]"],
    "augmentation.vtm.stop_gradient": ["true", "false"],
    "dataset.validation": [0, 0.2],
    "dataset.workers": [0, 0, 1],
    "recipe.grad_accum_steps": [1, 3],
    "recipe.optimizer": ["adamw", "sgd"],
    "recipe.schedule_step": ["epoch", "batch"],
    "recipe.clip_grad_norm": ["null", 1.0],
    "recipe.ema_decay": ["null", 0.9],
    "recipe.precision": ["float32", "bf16"],
    "recipe.evaluate_every": [1, 2],
    "recipe.transforms.auto_augment": ["null", "rand-m9-mstd0.5-inc1", "3a"],
    "recipe.transforms.erasing_mode": ["const", "rand", "pixel"],
    "checkpoint.every_minutes": ["null", 1e-6],  # after every step
}


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    stack = draw(st.sets(st.sampled_from(["mixup", "cutmix", "manifold_mixup", "htm", "vtm"])))
    unused = {"manifold_mixup", "mixup", "htm", "vtm"} - stack
    values = {}
    for key, choices in CHOICES.items():
        group, name, *_ = key.split(".")
        if group != "augmentation" or name not in unused:
            values[key] = draw(st.sampled_from(choices))
    values = settled(values, prefix="augmentation.htm.")
    line = [f"{key}={value}" for key, value in values.items()]
    stacked = ",".join(sorted(stack))
    return line_of([OWN, SHORT, f"augmentation=[{stacked}]", line])


@settings(max_examples=settings.default.max_examples // 25, phases=[Phase.generate])
@given(command_lines(), st.sampled_from(["SIGTERM", "fail", "interrupt"]), st.integers(2, 90))
def test_runs_with_any_settings_resume_exactly(line: list[str], event: str, at: int):
    with TemporaryDirectory() as root:
        overrides = (line, f"output_root={root}", "resume=auto")
        whole = train("name=whole", overrides)
        assume(whole.status != 2)  # an invalid combination
        with disturbed(event, at):
            assert train("name=mine", overrides).status != 2, line
        assert whole.status == 0, line
        assert train("name=mine", overrides).status == 0, line
        assert same(Run(f"{root}/mine"), Run(f"{root}/whole")) == [], line
