"""Two ranks on a CPU: the same losses as one process, one run folder, every image once."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from reproduction.runs import RunFolder
from tests.reproduction.conftest import Command
from tests.reproduction.test_training import assert_same_result

ROOT = Path(__file__).parents[2]

# Nothing random but the order of the images, so that one and two ranks see the same.
PLAIN = [
    "augmentation=[]",
    "model.embed_dim=16",
    "model.attn_drop=0",
    "model.drop_path=0",
    "dataset.limit=95",
    "recipe.batch_size=10",
    "recipe.epochs=2",
    "recipe.transforms.scale=[1,1]",
    "recipe.transforms.ratio=[1,1]",
    "recipe.transforms.interpolation=bicubic",
    "device=cpu",
]

MIXING = [
    *(x for x in PLAIN if not x.startswith(("augmentation", "recipe.epochs"))),
    *("augmentation=[mixup,htm,vtm]", "augmentation.htm.tau=inf", "recipe.epochs=1", "devices=2"),
]


def run(tmp_path: Path, command: list[str], *args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(  # noqa: PLW1510  # the tests look at the status
        [*command, str(ROOT / "train.py"), *args],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def lines_of(tmp_path: Path, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    folder = RunFolder(tmp_path / "outputs" / name)
    assert folder.read_summary()["status"] == "finished"
    return folder.read_metrics()


def test_two_ranks_equal_one_process_also_in_micro_batches(tmp_path: Path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    for name, command, more in [
        ("one", [sys.executable], []),
        ("two", [sys.executable], ["devices=2"]),
        ("torchrun", torchrun, ["recipe.grad_accum_steps=3"]),  # of shares of 4 and 5 images
    ]:
        ended = run(tmp_path, command, f"name={name}", *PLAIN, *more)
        assert ended.returncode == 0, ended.stderr
    assert {path.name for path in (tmp_path / "outputs").iterdir()} == {"one", "two", "torchrun"}
    one_steps, one_epochs = lines_of(tmp_path, "one")
    assert len(one_steps) == 20
    for name in ("two", "torchrun"):
        steps, epochs = lines_of(tmp_path, name)
        assert [line["step"] for line in steps] == list(range(1, 21))
        for ours, theirs in zip(steps, one_steps, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
        for ours, theirs in zip(epochs, one_epochs, strict=True):
            assert ours["top1"] == pytest.approx(theirs["top1"])
            assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], abs=1e-4)
    assert RunFolder(tmp_path / "outputs/torchrun").read_config()["devices"] == 2


def test_two_ranks_mix_within_their_shares_and_count_together(tmp_path: Path):
    ended = run(tmp_path, [sys.executable], "-m", "seed=0,1", *MIXING)
    assert ended.returncode == 0, ended.stderr
    names = [path.name for path in (tmp_path / "outputs").iterdir() if path.name != ".sweeps"]
    assert len(names) == 2
    for name in names:
        steps, _ = lines_of(tmp_path, name)
        assert sum(line["mixed_samples"] for line in steps) == 95


def test_a_failing_rank_ends_the_run_with_its_reason(tmp_path: Path):
    diverge = ["recipe.optimizer=sgd", "recipe.lr=1e30", "recipe.warmup_lr=1e30"]
    more = ["recipe.clip_grad_norm=null", "devices=2", "name=mine"]
    ended = run(tmp_path, [sys.executable], *PLAIN, *diverge, *more)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("train.py: rank ")
    assert "Traceback" in ended.stderr
    assert "the loss is nan" in last and "resume=auto" in last
    assert RunFolder(tmp_path / "outputs/mine").read_summary()["status"] == "failed"


BATCH_NORM = [  # narrow, with steps large enough that the statistics of the ranks differ
    *(x for x in PLAIN if not x.startswith(("model", "recipe.epochs"))),
    *("model=wrn_40_4", "model.options.layers=[1,1,1]", "model.options.channels=[8,8,8]"),
    *("recipe.lr=0.05", "recipe.epochs=1", "devices=2", "name=mine"),
]


@pytest.fixture(scope="module")
def run_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a model whose batch normalisation sees other images on each rank."""
    root = tmp_path_factory.mktemp("two_ranks")
    ended = run(root, [sys.executable], *BATCH_NORM)
    assert ended.returncode == 0, ended.stderr
    return root / "outputs" / "mine"


def test_ranks_evaluate_what_the_first_one_saves(run_of_two_ranks: Path, command: Command):
    _, (epoch,) = RunFolder(run_of_two_ranks).read_metrics()
    assert command("eval", f"run={run_of_two_ranks}", "devices=1").status == 0
    saved = json.loads((run_of_two_ranks / "evaluation-last.json").read_text())
    assert saved["eval_loss"] == pytest.approx(epoch["eval_loss"], rel=1e-5)


def test_what_only_ranks_find_out_is_refused_in_one_line_too(
    tmp_path: Path, run_of_two_ranks: Path
):
    folder = RunFolder(shutil.copytree(run_of_two_ranks, tmp_path / "outputs" / "mine"))
    folder.write_summary(status="interrupted")
    folder.last_path.write_bytes(b"broken")
    ended = run(tmp_path, [sys.executable], *BATCH_NORM, "resume=auto")
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "last.pt: not readable" in ended.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["devices=4"], "devices=4: torchrun has started 2 ranks"),
        (["-m", "seed=0,1"], "without torchrun"),
    ],
)
def test_torchrun_refuses_what_contradicts_it(tmp_path, monkeypatch, capsys, args, message):
    import train
    from reproduction.cli import run as run_cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["train.py", *args])
    with pytest.raises(SystemExit) as end:
        run_cli("train", train.resolve, train.check_all, train.main)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_two_ranks_stop_after_the_same_step_and_go_on_there(tmp_path: Path):
    args = [*(x for x in MIXING if not x.startswith("recipe.epochs")), "recipe.epochs=3"]
    args.append("checkpoint.every_minutes=0.001")  # by the first rank's clock
    process = start(tmp_path, "name=mine", *args)
    mine = RunFolder(tmp_path / "outputs/mine")
    wait_for(mine.last_path)
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    assert len(err.splitlines()) == 1
    assert torch.load(mine.last_path, weights_only=True)["step"] < 30
    ended = run(tmp_path, [sys.executable], "name=mine", "resume=auto", *args)
    assert ended.returncode == 0, ended.stderr
    assert run(tmp_path, [sys.executable], "name=whole", *args).returncode == 0
    assert_same_result(mine, RunFolder(tmp_path / "outputs/whole"))


@pytest.mark.parametrize(
    "more", [["dataset.workers=2"], ["devices=2"]], ids=["one process", "two ranks"]
)
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_its_processes_leaves_a_run_that_can_go_on(
    tmp_path: Path, sign: signal.Signals, more: list[str]
):
    args = [x for x in PLAIN if not x.startswith("recipe.epochs")]
    process = start(tmp_path, "name=mine", "recipe.epochs=1000", *args, *more)
    folder = RunFolder(tmp_path / "outputs/mine")
    wait_for(folder.last_path)
    os.killpg(process.pid, sign)  # as a terminal sends SIGINT, and a cluster SIGTERM
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "interrupted" in err.splitlines()[-1] and "resume=auto" in err.splitlines()[-1]
    assert folder.read_summary()["status"] == "interrupted"
    steps, _ = folder.read_metrics()
    assert torch.load(folder.last_path, weights_only=True)["step"] == steps[-1]["step"]


def start(tmp_path: Path, *args: str) -> subprocess.Popen[str]:
    """train.py at work, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *args],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # heard even where the tests run in the background of a shell, which ignores it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 300  # machines are shared
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.1)
