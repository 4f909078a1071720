"""Runs that are stopped, killed or damaged end as undisturbed ones.

The runs read the images of tests/images.py, which let something happen at a chosen image.
"""

import resource
import shutil
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.conftest import settled
from tests.doors import SMALL, Run, evaluate, same, script, snapshot, train
from tests.images import OWN, disturbed

# Everything that has a state: 3 epochs of batches of 20, 20 and 17, in micro-batches of 7 or 6.
TRAINING = (
    *(*OWN, "+dataset.options.train=57", "recipe.grad_accum_steps=3", "recipe.ema_decay=0.8"),
    *("augmentation=[mixup,cutmix,manifold_mixup,htm,vtm]", "augmentation.htm.tau=2.29"),
    *("augmentation.htm.rho=0", "augmentation.manifold_mixup.layers=[0,1]", "model.attn_drop=0.1"),
    *("recipe.transforms.erasing_prob=0.5", "recipe.lr=0.01"),
    *(word for word in SMALL if "limit" not in word and "epochs=" not in word),
    *("recipe.epochs=3", "name=mine", "resume=auto"),
)
BY_EPOCHS = (*TRAINING, "checkpoint.every_epochs=1")
BY_STEPS = (*TRAINING, "checkpoint.every_minutes=1e-6")
STEPS = 9


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The undisturbed run, with a checkpoint after each step."""
    root = tmp_path_factory.mktemp("whole")
    result = train(*BY_STEPS, f"output_root={root}")
    assert result.status == 0, result.err
    return Run(root / "mine")


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run as a failure in its last epoch leaves it, with a checkpoint of the step before."""
    root = tmp_path_factory.mktemp("failed")
    with disturbed("fail", at=160):
        assert train(*BY_STEPS, f"output_root={root}").status == 1
    run = Run(root / "mine")
    assert [run.checkpoint(age)["step"] for age in (0, 1)] == [8, 7]
    return run


@pytest.fixture
def left(here: Path, failed: Run) -> Run:
    shutil.copytree(failed.path, "outputs/mine")
    return Run("outputs/mine")


def ends_as(whole: Run, *words: str) -> None:
    """Lets the run go on, and compares it with the undisturbed one."""
    result = train(*words)
    assert result.status == 0, result.err
    run = Run("outputs/mine")
    assert same(run, whole) == []
    assert run.summary["status"] == "finished"
    assert not [*run.path.rglob("*.tmp")]


def test_checkpoints_are_written_within_epochs_and_the_newest_two_are_kept(whole: Run):
    states = [whole.checkpoint(age) for age in range(len(whole.checkpoints))]
    assert [(x["step"], x["epoch"]) for x in states] == [(STEPS, 3), (STEPS, 2)]


@pytest.mark.parametrize("words", [BY_EPOCHS, BY_STEPS], ids=["by epochs", "by steps"])
def test_signals_end_a_run_after_a_step_and_it_resumes_there(
    here: Path, whole: Run, words: tuple[str, ...]
):
    """Within the first batch, in the middle and at the end of epochs."""
    done = 0
    signals = ["SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT"]
    for name, at in zip(signals, (3, 45, 56, 57), strict=True):
        with disturbed(name, at):
            result = train(*words)
        run = Run("outputs/mine")
        assert (result.status, len(result.lines)) == (130, 1), result.err
        assert "interrupted" in result.err
        assert "repeat the command to continue" in result.err
        assert run.summary["status"] == "interrupted"
        assert len(run.steps) >= done
        done = len(run.steps)
        assert done == 0 or run.checkpoint()["step"] == done == run.steps[-1]["step"]
    assert 0 < done < STEPS
    ends_as(whole, *words)


@pytest.mark.parametrize("half", ["train", "held_out"])
def test_a_signal_ends_the_wait_for_an_image(here: Path, whole: Run, half: str):
    """As on a file system that hangs."""
    with disturbed("hang", at=31, half=half):
        assert train(*BY_EPOCHS).status == 130
    assert Run("outputs/mine").summary["status"] == "interrupted"
    ends_as(whole, *BY_EPOCHS)


def test_failures_are_recorded_and_named_in_a_last_line(here: Path, whole: Run):
    """A mistake in the code of a data set keeps its traceback above that line."""
    for event, at, status, part in (
        ("interrupt", 70, 130, "interrupted"),
        ("fail", 30, 1, "ZeroDivisionError: what"),
    ):
        with disturbed(event, at):
            result = train(*BY_EPOCHS)
        assert result.status == status, result.err
        assert ("Traceback" in result.err) == (event == "fail")
        line = result.lines[-1]
        assert part in line
        assert "outputs/mine" in line
        assert "repeat the command to continue" in line
        kind = "interrupted" if status == 130 else "failed"
        assert Run("outputs/mine").summary["status"] == kind
    ends_as(whole, *BY_EPOCHS)


@pytest.mark.parametrize(("at", "half"), [(30, "train"), (130, "train"), (50, "held_out")])
def test_a_killed_run_ends_as_an_undisturbed_one(here: Path, whole: Run, at: int, half: str):
    with disturbed("SIGKILL", at, half):
        assert train(*BY_STEPS, apart=True).status == -signal.SIGKILL
    run = Run("outputs/mine")
    written = [line["step"] for line in run.steps]
    assert written == [*range(1, len(written) + 1)]
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "epo')  # cut short by the kill
    ends_as(whole, *BY_STEPS)


def test_a_kill_while_a_checkpoint_is_written_loses_at_most_that_one(left: Run, whole: Run):
    """The one before it is moved already, last.pt is missing, a temporary file is left."""
    last, *_ = left.checkpoints
    last.rename(last.with_name(".last.pt.tmp"))
    result = evaluate("run=outputs/mine", *OWN[1:2], "device=cpu")
    assert result.status == 0
    assert not result.err
    assert "last-1.pt" in result.out
    ends_as(whole, *BY_STEPS)


@pytest.mark.parametrize("size", [None, 1000, 0], ids=["a bit", "cut", "empty"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    left: Run, whole: Run, size: int | None
):
    """The best weights are again those of the checkpoint that the run goes back to."""
    broken, good = left.checkpoints
    data = broken.read_bytes()
    broken.write_bytes(flipped(data) if size is None else data[:size])
    best = left.path / "checkpoints" / "best.safetensors"
    saved = torch.load(good, weights_only=True)["best"]
    best.write_bytes(b"of a later epoch")
    with disturbed("interrupt", at=25):
        result = train(*BY_STEPS)
    warning, _ = result.lines
    assert warning.startswith("warning: ")
    assert "last.pt" in warning
    assert {name: x.tolist() for name, x in load_file(best).items()} == {
        name: x.tolist() for name, x in saved.items()
    }
    ends_as(whole, *BY_STEPS)


def flipped(data: bytes) -> bytes:
    """The data with a bit flipped in a weight."""
    place = len(data) // 2
    return data[:place] + bytes([data[place] ^ 64]) + data[place + 1 :]


FILES = (
    "config.yaml",
    "summary.json",
    "metrics.jsonl",
    ".lock",
    "checkpoints/last.pt",
    "checkpoints/last-1.pt",
    "checkpoints/best.safetensors",
)
WARNED = ("config.yaml", "summary.json", "metrics.jsonl", "checkpoints/last.pt")


def damage(path: Path, how: str) -> None:
    """As a loss of power may leave a file: empty, or cut short, if it has lines behind one."""
    content = path.read_bytes()
    kept = b""
    if how == "truncated":
        half = content[: len(content) // 2]
        kept = half[: half.rfind(b"\n") + 1] or half
    path.write_bytes(kept)


@pytest.mark.parametrize("how", ["emptied", pytest.param("truncated", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "names",
    [
        FILES[:4],
        *(pytest.param((name,), marks=pytest.mark.slow) for name in FILES),
    ],
    ids=" ".join,
)
def test_a_run_with_damaged_files_ends_as_an_undisturbed_one(
    left: Run, whole: Run, names: tuple[str, ...], how: str
):
    """The weights win: of what is lost a warning tells, and only lines can be lost."""
    for name in names:
        damage(left.path / name, how)
    result = train(*BY_STEPS)
    assert result.status == 0, result.err
    assert all(line.startswith("warning: ") for line in result.lines)
    for name in names:
        assert (left.path / name).stat().st_size > 0
        assert (name in result.err) == (name in WARNED), result.err
    different = same(left, whole)
    if "metrics.jsonl" in names:
        different = [name for name in different if not name.startswith("lines.")]
    assert different == []


def test_a_run_with_damaged_files_is_found_evaluated_and_tabled(left: Run, whole: Run):
    for name in FILES[:4]:
        damage(left.path / name, "emptied")
    table = script("runs", "outputs")
    assert table.status == 0 and "interrupted after epoch 2 of 3" in table.out, table
    assert evaluate("run=outputs/mine", *OWN[1:2], "device=cpu").status == 0
    result = train(*(word for word in BY_STEPS if not word.startswith("name=")))
    assert result.status == 0 and "resuming after step 8" in result.out, result
    assert [path.name for path in Path("outputs").iterdir()] == ["mine"]
    damage(left.path / "summary.json", "truncated")  # of the finished run
    assert train(*BY_STEPS).status == 0
    assert left.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_a_run_begins_in_an_empty_folder(here: Path):
    """That somebody has made, or a run that was killed before its first file."""
    Path("outputs/mine").mkdir(parents=True)
    assert train(*OWN, "name=mine", "recipe.max_steps=1", *SMALL[:1]).status == 0
    for words in (("name=mine",), ("name=mine", "resume=auto", "seed=1")):
        result = train(*OWN, *words)
        assert (result.status, len(result.lines)) == (2, 1)
        assert "outputs/mine" in result.err


def test_a_run_without_readable_checkpoint_is_refused_unchanged(left: Run):
    for path in left.checkpoints:
        path.write_bytes(path.read_bytes()[:1000])
    before = snapshot()
    for result in (train(*BY_STEPS), evaluate("run=outputs/mine", *OWN[1:2], "device=cpu")):
        assert (result.status, len(result.lines)) == (2, 1)
        assert "last.pt" in result.err
    assert snapshot() == before


def test_a_full_disk_ends_a_run_in_one_line_and_it_resumes(here: Path, whole: Run):
    """Files end at 64 KiB: checkpoints are larger, metrics and messages are not."""
    with disturbed("SIGTERM", at=45):
        assert train(*BY_STEPS).status == 130
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        result = train(*BY_STEPS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (result.status, len(result.lines)) == (1, 1), result.err
    assert "File too large" in result.err
    assert "outputs/mine" in result.err
    ends_as(whole, *BY_STEPS)


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
    left_out = tuple(f"augmentation.{name}." for name in ("manifold_mixup", "mixup", "htm", "vtm"))
    left_out = tuple(key for key in left_out if key.split(".")[1] not in stack)
    values = {
        key: draw(st.sampled_from(values))
        for key, values in CHOICES.items()
        if not key.startswith(left_out)
    }
    values = settled(values, prefix="augmentation.htm.")
    line = [f"{key}={value}" for key, value in values.items()]
    small = [word for word in SMALL if "limit" not in word]
    return [*OWN, *small, f"augmentation=[{','.join(sorted(stack))}]", *line]


@settings(max_examples=settings.default.max_examples // 14, phases=[Phase.generate])
@given(command_lines(), st.sampled_from(["SIGTERM", "fail", "interrupt"]), st.integers(2, 90))
def test_runs_with_any_settings_resume_exactly(line: list[str], event: str, at: int):
    with TemporaryDirectory() as root:
        words = (*line, f"output_root={root}", "resume=auto")
        whole = train("name=whole", *words)
        assume(whole.status != 2)  # an invalid combination
        with disturbed(event, at):
            assert train("name=mine", *words).status != 2, line
        assert (whole.status, train("name=mine", *words).status) == (0, 0), line
        assert same(Run(f"{root}/mine"), Run(f"{root}/whole")) == [], line
