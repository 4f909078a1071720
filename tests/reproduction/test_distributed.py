"""Two ranks on a CPU: the same losses as one process, one run folder, every image once."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.run as distributed_run
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from reproduction.commands.jobs import resolve
from reproduction.data.build import build_source
from reproduction.data.loaders import EvaluationImages, data_loader, evaluation_batches
from reproduction.runs.compose import compose
from reproduction.runs.folder import RunFolder
from reproduction.system.errors import STOP_SIGNALS
from reproduction.training import distributed, endings
from reproduction.training.distributed import World, _failure_line
from reproduction.training.evaluate import _count, evaluate
from reproduction.training.loggers import Logs
from reproduction.training.train import build_trainer, run_training
from tests.chaos.runs import differences
from tests.reproduction.conftest import Command, at_step, run_here

pytestmark = pytest.mark.all_digits
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
    *("augmentation=[mixup,htm,vtm]", "augmentation.htm.tau=inf", "recipe.epochs=4", "devices=2"),
    *("augmentation.htm.rho=0", "augmentation.off_epoch=3"),
]


def lines_of(tmp_path: Path, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    folder = RunFolder(tmp_path / "outputs" / name)
    assert folder.read_summary()["status"] == "finished"
    return folder.read_metrics()


def test_two_ranks_equal_one_process_also_in_micro_batches_and_after_the_death_of_one(
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    for name, more in (("one", []), ("two", ["devices=2"])):
        assert command("train", f"name={name}", *PLAIN, *more).status == 0
    at_step(monkeypatch, 15, partial(kill_once, "0"))
    torchrun = ["--nproc-per-node=2", "--max-restarts=1", "--run-path", "--start-method=fork"]
    in_parts = "recipe.grad_accum_steps=3"  # of shares of 4 and 5 images
    with endings.handling(endings.stop_at_once):  # torchrun's own stay
        distributed_run.main([*torchrun, str(ROOT / "train.py"), "name=torchrun", *PLAIN, in_parts])
    assert "restart 1 of 1: all ranks resume after step 10" in capfd.readouterr().err
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
    runs = {name: RunFolder(tmp_path / "outputs" / name) for name in ("one", "two", "torchrun")}
    images = [torch.load(run.last_path, weights_only=True)["images"] for run in runs.values()]
    assert images[0] == images[1] == images[2] > 0
    assert runs["torchrun"].read_config()["devices"] == 2


@pytest.fixture(scope="module")
def mixing_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two ranks in one sweep, by seed."""
    root = tmp_path_factory.mktemp("mixing")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert run_here(patch, "train", "-m", "seed=0,1", *MIXING) == 0
    return root


def test_two_ranks_mix_within_their_shares_and_count_together(mixing_runs: Path):
    names = [path.name for path in (mixing_runs / "outputs").iterdir() if path.name != ".sweeps"]
    assert len(names) == 2
    for name in names:
        steps, _ = lines_of(mixing_runs, name)
        assert sum(line["mixed_samples"] for line in steps) == 3 * 95
        assert [line["gain_max"] is None for line in steps] == [False] * 30 + [True] * 10
        assert all(line["gain_max"] > line["gain_mean"] > 0 for line in steps[:30])


def test_a_failing_rank_ends_the_run_with_its_reason(tmp_path: Path, command: Command):
    diverge = ["recipe.optimizer=sgd", "recipe.lr=1e30", "recipe.warmup_lr=1e30"]
    more = ["recipe.clip_grad_norm=null", "devices=2", "name=mine"]
    ended = command("train", *PLAIN, *diverge, *more)
    assert ended.status == 1
    (last,) = ended.lines
    assert last.startswith("train.py: rank ")
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
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert run_here(patch, "train", *BATCH_NORM) == 0
    return root / "outputs" / "mine"


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_evaluate_what_the_first_one_saves(
    run_of_two_ranks: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    tmp_path_factory: pytest.TempPathFactory,
):
    temporary = tmp_path_factory.mktemp("temporary")
    _, (epoch,) = RunFolder(run_of_two_ranks).read_metrics()
    handlers = [signal.getsignal(signum) for signum in STOP_SIGNALS]
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert command("eval", f"run={run_of_two_ranks}", f"devices={ranks}").status == 0
    assert [signal.getsignal(signum) for signum in STOP_SIGNALS] == handlers
    assert not list(temporary.glob("torchelastic*"))
    saved = json.loads((run_of_two_ranks / "evaluation-last.json").read_text())
    assert saved["eval_loss"] == pytest.approx(epoch["eval_loss"], rel=1e-5)


def test_ranks_divide_the_cores_whatever_ran_before(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(distributed, "usable_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = []
    for ranks in (4, 2):
        with distributed._dividing_cores(ranks):
            found.append(os.environ["OMP_NUM_THREADS"])
    assert found == ["2", "4"] and "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with distributed._dividing_cores(4):
        assert os.environ["OMP_NUM_THREADS"] == "3"


def test_what_only_ranks_find_out_is_refused_in_one_line_too(
    tmp_path: Path, run_of_two_ranks: Path, command: Command
):
    folder = RunFolder(shutil.copytree(run_of_two_ranks, tmp_path / "outputs" / "mine"))
    folder.write_summary(status="interrupted")
    folder.last_path.write_bytes(b"broken")
    ended = command("train", *BATCH_NORM, "resume=auto")
    assert ended.status == 2
    (line,) = ended.lines
    assert "last.pt: not readable" in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["devices=4"], "devices=4: torchrun has started 2 ranks"),
        (["-m", "seed=0,1"], "without torchrun"),
        (["restarts=2"], "--max-restarts=2"),
    ],
)
def test_torchrun_refuses_what_contradicts_it(tmp_path, monkeypatch, capsys, args, message):
    import train
    from reproduction.commands.cli import run as run_cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["train.py", *args])
    with pytest.raises(SystemExit) as end:
        run_cli("train", train.resolve, train.check_all, train.main)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_two_ranks_stop_after_the_same_step_and_go_on_there_whatever_becomes_of_one(
    tmp_path: Path, mixing_runs: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    often = "checkpoint.every_minutes=0.001"  # by the first rank's clock
    with monkeypatch.context() as patch:
        at_step(patch, 20, stop_the_launcher)
        ended = command("train", "name=mine", often, *MIXING)
    assert ended.status == 130
    assert len(ended.lines) == 1
    mine = RunFolder(tmp_path / "outputs/mine")
    assert torch.load(mine.last_path, weights_only=True)["step"] < 35
    goes_on = ("name=mine", "resume=auto", "restarts=1", often)
    at_step(monkeypatch, 35, partial(kill_once, "1"))
    ended = command("train", *goes_on, *MIXING)
    assert ended.status == 0, ended.err
    (line,) = ended.lines
    assert line.startswith("restart 1 of 1: all ranks resume after step 3")
    (whole,) = (mixing_runs / "outputs").glob("*-s0-*")
    assert differences(mine, RunFolder(whole)) == []


def stop_the_launcher() -> None:
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGUSR1)


def kill_once(rank: str) -> None:
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (rank, "0"):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_waits_for_a_dead_one_in_vain_is_ended(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    """As in NCCL's sums, which do not notice."""

    def die_or_wait() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(20)  # the launcher alone would kill it after 30 seconds
        (tmp_path / "waited").touch()

    monkeypatch.setattr(endings, "SECONDS_AFTER_A_DEATH", 1)
    at_step(monkeypatch, 3, die_or_wait)
    ended = command("train", "name=mine", *MIXING)
    assert ended.status == 1 and "rank 1: killed by SIGKILL" in ended.err
    assert not (tmp_path / "waited").exists()


def test_only_the_first_rank_writes(tmp_path: Path):
    config = resolve(compose("train", ["name=mine", f"output_root={tmp_path}", *PLAIN]))
    run_training(config)
    folder = RunFolder.of(config)
    folder.last_path.unlink()  # back to the first epoch
    trainer = build_trainer(config, World(0, 1, torch.device("cpu")), build_source(config.dataset))
    trainer.world = World(1, 1, torch.device("cpu"))
    trainer.history[0]["top1"] = -1.0  # so that the second one is the best
    before = {path: path.read_bytes() for path in folder.path.rglob("*.*") if path.is_file()}
    trainer.fit(Logs())
    after = {path: path.read_bytes() for path in folder.path.rglob("*.*") if path.is_file()}
    assert after == before


def test_a_killed_rank_is_named():
    killed = ProcessFailure(local_rank=1, pid=7, exitcode=-9, error_file="none")
    assert _failure_line(killed) == "killed by SIGKILL"


@pytest.mark.parametrize(
    ("sign", "more"),
    [
        (signal.SIGINT, ["dataset.workers=2"]),
        (signal.SIGTERM, ["devices=2", "restarts=1"]),
    ],
    ids=["SIGINT, one process", "SIGTERM, two ranks"],
)
def test_a_signal_to_all_its_processes_leaves_a_run_that_can_go_on(
    tmp_path: Path, sign: signal.Signals, more: list[str]
):
    args = [x for x in PLAIN if not x.startswith("recipe.epochs")]
    process = start(tmp_path, "name=mine", "recipe.epochs=1000", *args, *more)
    folder = RunFolder(tmp_path / "outputs/mine")
    wait_for(folder.last_path)
    os.killpg(process.pid, sign)  # as a terminal sends SIGINT, and a cluster SIGTERM
    _, err = process.communicate(timeout=400)
    assert process.returncode == 130
    assert "interrupted" in err.splitlines()[-1] and "resume=auto" in err.splitlines()[-1]
    assert folder.read_summary()["status"] == "interrupted"
    steps, _ = folder.read_metrics()
    assert torch.load(folder.last_path, weights_only=True)["step"] == steps[-1]["step"]


@pytest.mark.parametrize(("held_out", "ranks"), [(101, 1), (101, 2), (101, 3), (2, 3)])
def test_every_image_is_evaluated_once_whatever_the_ranks(held_out: int, ranks: int):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(held_out, 3, 8, 8, generator=generator)
    targets = torch.randint(0, 3, (held_out,), generator=generator)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3))
    pairs = cast(Any, list(zip(images, targets.tolist(), strict=True)))
    data = EvaluationImages(pairs, cast(Any, torch.clone))
    together = Counted()
    for rank in range(ranks):
        world = Counted(rank, ranks, together.totals)
        loader = data_loader(data, evaluation_batches(held_out, 7, rank, ranks), 0, False)
        evaluate(model, torch.clone, loader, world, "float32")
    right = (model(images).argmax(dim=1) == targets).sum().item()
    assert together.totals[:3].tolist() == [held_out, right, held_out]


class Counted(World):
    """A rank that adds its sums to `totals`, which ranks share."""

    def __init__(self, rank: int = 0, size: int = 1, totals: torch.Tensor | None = None):
        super().__init__(rank, size, torch.device("cpu"))
        totals = torch.zeros(4, dtype=torch.float64) if totals is None else totals
        object.__setattr__(self, "totals", totals)

    totals: torch.Tensor

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.totals += values
        return torch.ones_like(values)


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


def test_the_fifth_of_five_counts_and_the_sixth_does_not():
    ranked = torch.arange(10.0).repeat(2, 1)  # class 9 comes first
    first, among_five, _ = _count(ranked, torch.tensor([5, 4])).tolist()
    assert (first, among_five) == (0, 1)
