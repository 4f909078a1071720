"""Two ranks on a CPU: the losses of one process, one run folder, signals, deaths."""

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.doors import Run, evaluate, eventually, same, snapshot, started, train
from tests.images import OWN, disturbed, recorded

# Only the order of the images is random, so that one and two ranks see the same inputs.
STILL = (
    *("model.embed_dim=16", "model.attn_drop=0", "model.drop_path=0", "recipe.epochs=2"),
    *("recipe.batch_size=10", "recipe.log_every=1", "checkpoint.every_epochs=1", "device=cpu"),
    "recipe.transforms.scale=[1,1]",
    *("recipe.transforms.interpolation=bicubic", "resume=auto", "name=mine"),
)
IMAGES = (*OWN, "+dataset.options.train=57", "+dataset.options.held_out=31")
PLAIN = (*STILL, *IMAGES, "augmentation=[]")
MIXING = (
    *(*STILL, *IMAGES, "augmentation=[mixup,htm,vtm]", "augmentation.htm.tau=inf"),
    *("augmentation.htm.rho=0", "recipe.epochs=3", "augmentation.off_epoch=2", "devices=2"),
    "recipe.ema_decay=0.8",
)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")


def close(ours: Run, theirs: Run) -> None:
    """Compares losses and results of runs whose sums are in another order."""
    for line, other in zip(ours.lines, theirs.lines, strict=True):
        speed = {"images_per_second": 0}
        assert line | speed == pytest.approx(other | speed, abs=1e-4)
    assert ours.summary["images"] == theirs.summary["images"] > 0


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run in one process."""
    root = tmp_path_factory.mktemp("one")
    assert train(*PLAIN, f"output_root={root}").status == 0
    return Run(root / "mine")


@pytest.fixture(scope="module")
def mixing(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two ranks with everything random; which images they read is beside it."""
    root = tmp_path_factory.mktemp("mixing")
    with recorded(root / "log"):
        result = train(*MIXING, f"output_root={root}")
    assert result.status == 0, result.err
    return Run(root / "mine")


def test_two_ranks_equal_one_process(here: Path, one: Run):
    assert train(*PLAIN, "devices=2").status == 0
    close(Run("outputs/mine"), one)
    assert [path.name for path in (here / "outputs").iterdir()] == ["mine"]


@pytest.mark.slow
def test_ranks_of_torchrun_with_micro_batches_equal_one_process_also_after_a_restart(
    here: Path, one: Run
):
    """Rank 0 is killed in its second epoch; micro-batches have 2 and 1 images."""
    words = (*PLAIN, "recipe.grad_accum_steps=3")
    with (
        disturbed("SIGKILL", at=48),
        started(*words, launcher=(*TORCHRUN, "--max-restarts=1")) as process,
    ):
        err = process.communicate(timeout=300)[1]
    assert process.returncode == 0, err
    close(Run("outputs/mine"), one)
    assert Run("outputs/mine").config["devices"] == 2


def test_ranks_mix_within_their_shares_and_sum_their_counts(mixing: Run):
    assert sum(line["mixed_samples"] for line in mixing.steps) == 2 * 57
    assert ["gain_max" in line for line in mixing.steps] == [True] * 12 + [False] * 6
    assert all(line["gain_max"] >= line["gain_mean"] > 0 for line in mixing.steps[:12])


@pytest.mark.slow
def test_ranks_evaluate_by_the_statistics_of_batch_norm_that_are_saved(here: Path):
    plain = (word for word in PLAIN if not word.startswith("model."))
    words = ("model=timm", "model.architecture=resnet10t", "recipe.lr=0.01", "devices=2")
    assert train(*plain, *words).status == 0
    assert evaluate("run=outputs/mine", *OWN[1:2], "device=cpu").status == 0
    run = Run("outputs/mine")
    assert run.evaluation()["eval_loss"] == pytest.approx(run.epochs[-1]["eval_loss"], rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_evaluate_the_saved_weights(here: Path, mixing: Run, ranks: int):
    words = (f"run={mixing.path}", *OWN[1:], f"devices={ranks}", "device=cpu")
    with recorded(here / "log"):
        result = evaluate(*words)
    assert result.status == 0, result.err
    assert mixing.evaluation()["eval_loss"] == pytest.approx(mixing.epochs[-1]["eval_loss"])
    reads = Counter(line.rpartition(" ")[0] for line in (here / "log").read_text().splitlines())
    assert reads == {f"held_out {i}": 1 for i in range(31)}


@pytest.mark.parametrize(
    "events",
    [
        [("SIGTERM", 1), ("fail", 1)],
        pytest.param([("SIGUSR1", 0), ("SIGKILL", 1), ("fail", 0)], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_happens_to_one_rank_ends_all_and_they_resume(
    here: Path, mixing: Run, events: list[tuple[str, int]]
):
    """A signal ends them after the same step, with a checkpoint."""
    run = Run("outputs/mine")
    for event, rank in events:
        with disturbed(event, at=20 if event == "fail" else 33, rank=rank):
            result = train(*MIXING)
        is_stop = event in ("SIGTERM", "SIGUSR1")
        assert result.status == (130 if is_stop else 1), result.err
        assert len(result.lines) == 1 or "Traceback" in result.err  # of a bug
        assert run.summary["status"] == ("interrupted" if is_stop else "failed")
        if is_stop:
            assert run.checkpoint()["step"] == run.steps[-1]["step"] < 18
        else:
            reason = event if event == "SIGKILL" else "ZeroDivisionError"
            assert f"rank {rank}: " in result.err
            assert reason in result.err
        assert "outputs/mine" in result.err
    assert train(*MIXING).status == 0
    assert same(run, mixing) == []


@pytest.mark.slow
def test_mistakes_within_ranks_end_in_one_line(here: Path, mixing: Run):
    shutil.copytree(mixing.path, "outputs/mine")
    summary = here / "outputs/mine/summary.json"
    summary.write_text(json.dumps(mixing.summary | {"status": "interrupted"}))
    for path in Run("outputs/mine").checkpoints:
        path.write_bytes(b"broken")
    result = train(*MIXING)
    assert (result.status, len(result.lines)) == (2, 1)
    assert "last.pt" in result.err


def test_options_that_contradict_torchrun_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for words, part in ((("devices=4",), "devices=4"), (("-m", "seed=0,1"), "torchrun")):
        result = train(*words)
        assert (result.status, len(result.lines)) == (2, 1)
        assert part in result.err
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
    with started(*PLAIN, "recipe.epochs=1000", *more) as process:
        eventually(lambda: run.checkpoints)
        os.killpg(process.pid, sign)
        err = process.communicate(timeout=300)[1]
    assert process.returncode == 130
    (line,) = [x for x in err.splitlines() if x.startswith("train.py: ")]
    assert "interrupted" in line
    assert run.summary["status"] == "interrupted"
    assert run.checkpoint()["step"] == run.steps[-1]["step"]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_outlives_its_terminal_if_it_ignores_the_signal(here: Path, devices: int):
    terminal, end = os.openpty()
    run = Run("outputs/mine")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    words = (*PLAIN, "recipe.epochs=3", f"devices={devices}")
    words += ("++dataset.options.train=1100",)  # epochs of a second, whose bars draw themselves
    with started(*words, stdout=end) as process:
        signal.signal(signal.SIGHUP, before)
        os.close(end)
        eventually(lambda: run.checkpoints)
        os.killpg(process.pid, signal.SIGHUP)
        os.close(terminal)
        err = process.communicate(timeout=300)[1]
    assert (process.returncode, err) == (0, "")
    assert run.summary["status"] == "finished"
