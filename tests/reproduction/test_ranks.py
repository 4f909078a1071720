"""Two ranks on a CPU: the losses of one process, one run folder, signals, deaths."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import slow
from tests.images import OWN, SOURCE, disturbed, reads, recorded
from tests.poison import KINDS
from tests.programs import (
    TORCHRUN,
    Run,
    assert_refused,
    assert_same_lines,
    assert_succeeded,
    ended,
    evaluate,
    eventually,
    line_of,
    overrides_of,
    same,
    snapshot,
    started,
    train,
    trained,
)

# Only the order of the images is random, so that one and two ranks see the same inputs.
STILL = overrides_of("""
    model.embed_dim=16 model.attn_drop=0 model.drop_path=0 recipe.epochs=2 recipe.batch_size=10
    recipe.log_every=1 checkpoint.every_epochs=1 device=cpu recipe.transforms.scale=[1,1]
    recipe.transforms.interpolation=bicubic resume=auto name=mine recipe.drop_last=false
""")
IMAGES = (OWN, "+dataset.options.train=57", "+dataset.options.held_out=31")
PLAIN = (STILL, IMAGES, "augmentation=[]")
MIXING = (
    STILL,
    IMAGES,
    overrides_of("""
        augmentation=[mixup,htm,vtm] augmentation.htm.tau=inf augmentation.htm.rho=0 recipe.epochs=3
        augmentation.off_epoch=2 devices=2 recipe.ema_decay=0.8
    """),
)


def close(ours: Run, theirs: Run) -> None:
    """Compares losses and results of runs whose sums are in another order."""
    assert_same_lines(ours.lines, theirs.lines, abs=1e-4)
    assert ours.summary["images"] == theirs.summary["images"] > 0


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run in one process."""
    return trained(PLAIN, root=tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def mixing(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two ranks with everything random; which images they read is beside it."""
    root = tmp_path_factory.mktemp("mixing")
    with recorded(root / "log"):
        return trained(MIXING, root=root)


@pytest.mark.parametrize("spawns", [False, slow(True)])
def test_two_ranks_equal_one_process(here: Path, one: Run, spawns: bool):
    close(trained(PLAIN, "devices=2", spawns=spawns), one)
    assert [path.name for path in (here / "outputs").iterdir()] == ["mine"]


@pytest.mark.slow
def test_ranks_of_torchrun_with_micro_batches_equal_one_process_also_after_a_restart(
    here: Path, one: Run
):
    """Rank 0 is killed in its second epoch; micro-batches have 2 and 1 images."""
    overrides = (PLAIN, "recipe.grad_accum_steps=3")
    with (
        disturbed("SIGKILL", at=48),
        started(overrides, launcher=(TORCHRUN, "--max-restarts=1")) as process,
    ):
        assert_succeeded(ended(process))
    run = Run("outputs/mine")
    close(run, one)
    assert run.config["devices"] == 2


def test_ranks_mix_within_their_shares_and_sum_their_counts(mixing: Run):
    samples = [line["easy_samples"] for line in mixing.steps]
    gains = [line for line in mixing.steps if "gain_max" in line]
    assert sum(samples) == 2 * 57
    assert len(samples) == 18
    assert gains == mixing.steps[:12]
    for line in gains:
        assert line["gain_max"] >= line["gain_mean"] > 0


@pytest.mark.slow
def test_ranks_evaluate_by_the_statistics_of_batch_norm_that_are_saved(here: Path):
    plain = [override for override in line_of(PLAIN) if not override.startswith("model.")]
    overrides = overrides_of("model=timm model.architecture=resnet10t recipe.lr=0.01 devices=2")
    run = trained(plain, overrides)
    assert_succeeded(evaluate("run=outputs/mine", SOURCE, "device=cpu"))
    assert run.evaluation()["eval_loss"] == pytest.approx(run.epochs[-1]["eval_loss"], rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_evaluate_the_saved_weights(here: Path, mixing: Run, ranks: int):
    overrides = (f"run={mixing.path}", OWN[1:], f"devices={ranks}", "device=cpu")
    with recorded(here / "log"):
        assert_succeeded(evaluate(overrides))
    assert mixing.evaluation()["eval_loss"] == pytest.approx(mixing.epochs[-1]["eval_loss"])
    found = [(read.half, read.index) for read in reads(here / "log")]
    assert sorted(found) == [("held_out", index) for index in range(31)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_end_at_a_step_that_is_not_finite_on_one_and_repeat_it(
    here: Path, mixing: Run, kind: str
):
    run = Run("outputs/mine")
    with disturbed(kind, at=28, rank=1):
        result = train(MIXING, "recipe.log_every=100")
    assert_refused(result, "step 7: ", "resuming repeats it", "kept as failed", status=1)
    assert run.checkpoint()["step"] == 6
    assert_same_lines(run.steps, mixing.steps[:6], abs=0)
    assert same(trained(MIXING), mixing) == []


class Ending(NamedTuple):
    """What happens to a run of which a rank reads its image `at`."""

    at: int
    status: int
    state: str
    reason: str


EVENTS = {
    "SIGTERM": Ending(33, 130, "interrupted", "interrupted"),
    "SIGUSR1": Ending(33, 130, "interrupted", "interrupted"),
    "SIGKILL": Ending(33, 1, "failed", "SIGKILL"),
    "fail": Ending(20, 1, "failed", "ZeroDivisionError"),
}


@pytest.mark.parametrize(
    "events",
    [
        [("SIGTERM", 1), ("fail", 1)],
        slow([("SIGUSR1", 0), ("SIGKILL", 1), ("fail", 0)]),
    ],
    ids=str,
)
def test_what_happens_to_one_rank_ends_all_and_they_resume(
    here: Path, mixing: Run, events: list[tuple[str, int]]
):
    """A signal ends them after the same step, with a checkpoint."""
    run = Run("outputs/mine")
    for event, rank in events:
        expected = EVENTS[event]
        with disturbed(event, at=expected.at, rank=rank):
            result = train(MIXING)
        assert result.status == expected.status, result.err
        assert run.summary["status"] == expected.state
        assert "outputs/mine" in result.err
        assert expected.reason in result.err
        if event == "fail":
            assert "Traceback" in result.err
        else:
            assert len(result.lines) == 1
        if expected.state == "interrupted":
            assert run.checkpoint()["step"] == run.steps[-1]["step"] < 18
        else:
            assert f"rank {rank}: " in result.err
    assert same(trained(MIXING), mixing) == []


@pytest.mark.slow
def test_mistakes_within_ranks_end_in_one_line(here: Path, mixing: Run):
    shutil.copytree(mixing.path, "outputs/mine")
    summary = here / "outputs/mine/summary.json"
    summary.write_text(json.dumps(mixing.summary | {"status": "interrupted"}))
    for path in Run("outputs/mine").checkpoints:
        path.write_bytes(b"broken")
    assert_refused(train(MIXING), "last.pt")


def test_devices_that_contradict_torchrun_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_refused(train("devices=4"), "devices=4")
    assert not snapshot()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sign", "more"),
    [
        (signal.SIGINT, ["dataset.workers=2"]),
        (signal.SIGTERM, ["devices=2"]),
        (signal.SIGHUP, ["devices=2", "dataset.workers=1"]),
    ],
    ids=["SIGINT, one process", "SIGTERM, two ranks", "SIGHUP, two ranks with workers"],
)
def test_signal_to_the_process_group_leaves_a_resumable_run(
    here: Path, sign: signal.Signals, more: list[str]
):
    """As a terminal sends SIGINT, and a cluster SIGTERM."""
    run = Run("outputs/mine")
    with started(PLAIN, "recipe.epochs=1000", more) as process:
        eventually(lambda: run.checkpoints)
        os.killpg(process.pid, sign)
        result = ended(process)
    assert result.status == 130
    (line,) = [line for line in result.lines if line.startswith("train.py: ")]
    assert "interrupted" in line
    assert run.summary["status"] == "interrupted"
    assert run.checkpoint()["step"] == run.steps[-1]["step"]
