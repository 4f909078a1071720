"""Two ranks on a CPU: the losses of one process, one run folder, every image evaluated once."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.run as distributed_run
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from reproduction.data.loaders import EvaluationImages, data_loader, evaluation_batches
from reproduction.data.sources import build_source
from reproduction.runs.compose import compose
from reproduction.runs.folder import RunFolder
from reproduction.start.resolve import resolve
from reproduction.system.errors import STOP_SIGNALS
from reproduction.training import distributed, endings
from reproduction.training.distributed import World, _failure_line
from reproduction.training.evaluate import _count, evaluate
from reproduction.training.loggers import Logs
from reproduction.training.train import build_epochs, run_training
from tests.chaos.runs import differences
from tests.reproduction.conftest import Command, at_step, run_here

pytestmark = pytest.mark.all_digits
ROOT = Path(__file__).parents[2]

# Only the order of the images is random, so that one and two ranks see the same inputs.
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


def test_two_ranks_equal_one_process_also_with_micro_batches_and_a_restart(
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    for name, more in (("one", []), ("two", ["devices=2"])):
        assert command("train", f"name={name}", *PLAIN, *more).status == 0
    at_step(monkeypatch, 15, partial(kill_once, "0"))
    torchrun = ["--nproc-per-node=2", "--max-restarts=1", "--run-path", "--start-method=fork"]
    in_parts = "recipe.grad_accum_steps=3"  # micro-batches of 4 and 5 images per rank
    run = ["name=torchrun", "resume=auto", *PLAIN, in_parts]
    with endings.handling(endings.stop_at_once):  # torchrun does not restore the handlers
        distributed_run.main([*torchrun, str(ROOT / "train.py"), *run])
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
    """A sweep over two seeds, each a run of two ranks."""
    root = tmp_path_factory.mktemp("mixing")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert run_here(patch, "train", "-m", "seed=0,1", *MIXING) == 0
    return root


def test_ranks_mix_within_their_shares_and_sum_their_counts(mixing_runs: Path):
    names = [path.name for path in (mixing_runs / "outputs").glob("cct*")]
    assert len(names) == 2
    for name in names:
        steps, _ = lines_of(mixing_runs, name)
        assert sum(line["mixed_samples"] for line in steps) == 3 * 95
        assert ["gain_max" in line for line in steps] == [True] * 30 + [False] * 10
        assert all(line["gain_max"] > line["gain_mean"] > 0 for line in steps[:30])


def test_failing_rank_ends_the_run_with_its_error(tmp_path: Path, command: Command):
    diverge = ["recipe.optimizer=sgd", "recipe.lr=1e30", "recipe.warmup_lr=1e30"]
    more = ["recipe.clip_grad_norm=null", "devices=2", "name=mine"]
    result = command("train", *PLAIN, *diverge, *more)
    assert result.status == 1
    (last,) = result.lines
    assert last.startswith("train.py: rank ")
    assert "the loss is nan" in last and "resume=auto" in last
    assert RunFolder(tmp_path / "outputs/mine").read_summary()["status"] == "failed"


BATCH_NORM = [  # a narrow model, with a learning rate that lets the ranks' statistics differ
    *(x for x in PLAIN if not x.startswith(("model", "recipe.epochs"))),
    *("model=wrn_40_4", "model.options.layers=[1,1,1]", "model.options.channels=[8,8,8]"),
    *("recipe.lr=0.05", "recipe.epochs=1", "devices=2", "name=mine"),
]


@pytest.fixture(scope="module")
def run_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose batch norm sees different images on each rank."""
    root = tmp_path_factory.mktemp("two_ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert run_here(patch, "train", *BATCH_NORM) == 0
    return root / "outputs" / "mine"


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_evaluate_the_saved_weights(
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
    monkeypatch.setattr(
        socket, "getfqdn", lambda *_: "unknown.invalid"
    )  # torch's address of a node
    assert command("eval", f"run={run_of_two_ranks}", f"devices={ranks}").status == 0
    assert [signal.getsignal(signum) for signum in STOP_SIGNALS] == handlers
    assert not list(temporary.glob("torchelastic*"))
    saved = json.loads((run_of_two_ranks / "evaluation-last.json").read_text())
    assert saved["eval_loss"] == pytest.approx(epoch["eval_loss"], rel=1e-5)


def test_dividing_cores_divides_them_among_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(distributed, "usable_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = []
    for ranks in (4, 2):
        with distributed._dividing_cores(ranks):
            threads.append(os.environ["OMP_NUM_THREADS"])
    assert threads == ["2", "4"] and "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with distributed._dividing_cores(4):
        assert os.environ["OMP_NUM_THREADS"] == "3"


def test_user_errors_within_ranks_end_in_one_line(
    tmp_path: Path, run_of_two_ranks: Path, command: Command
):
    folder = RunFolder(shutil.copytree(run_of_two_ranks, tmp_path / "outputs" / "mine"))
    folder.write_summary(status="interrupted")
    folder.last_path.write_bytes(b"broken")
    result = command("train", *BATCH_NORM, "resume=auto")
    assert result.status == 2
    (line,) = result.lines
    assert "last.pt: not readable" in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["devices=4"], "devices=4: torchrun has started 2 ranks"),
        (["-m", "seed=0,1"], "without torchrun"),
    ],
)
def test_options_that_contradict_torchrun_are_refused(tmp_path, monkeypatch, capsys, args, message):
    import train
    from reproduction.start.command import run as run_cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["train.py", *args])
    with pytest.raises(SystemExit) as end:
        run_cli("train", train.resolve, train.check_all, train.main)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ranks_stop_after_the_same_step_and_resume_also_after_a_kill(
    tmp_path: Path, mixing_runs: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    often = "checkpoint.every_minutes=0.001"  # by the clock of rank 0
    with monkeypatch.context() as patch:
        at_step(patch, 20, stop_the_launcher)
        result = command("train", "name=mine", often, *MIXING)
    assert result.status == 130
    assert len(result.lines) == 1
    mine = RunFolder(tmp_path / "outputs/mine")
    assert torch.load(mine.last_path, weights_only=True)["step"] < 35
    resumed = ("name=mine", "resume=auto", often)
    with monkeypatch.context() as patch:
        at_step(patch, 35, partial(kill_once, "1"))
        killed = command("train", *resumed, *MIXING)
    assert killed.status == 1 and "rank 1: killed by SIGKILL" in killed.lines[-1]
    assert command("train", *resumed, *MIXING).status == 0
    (undisturbed,) = (mixing_runs / "outputs").glob("*-s0-*")
    assert differences(mine, RunFolder(undisturbed)) == []


def stop_the_launcher() -> None:
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGUSR1)


def kill_once(rank: str) -> None:
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (rank, "0"):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_rank_that_waits_for_a_dead_one_is_ended(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    """NCCL's collectives do not notice a dead rank."""

    def die_or_wait() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(20)  # the launcher alone would kill it after 30 seconds
        (tmp_path / "waited").touch()

    monkeypatch.setattr(endings, "SECONDS_AFTER_A_DEATH", 1)
    at_step(monkeypatch, 3, die_or_wait)
    result = command("train", "name=mine", *MIXING)
    assert result.status == 1 and "rank 1: killed by SIGKILL" in result.err
    assert not (tmp_path / "waited").exists()


def test_only_rank_0_writes(tmp_path: Path):
    config = resolve(compose("train", ["name=mine", f"output_root={tmp_path}", *PLAIN]))
    run_training(config)
    folder = RunFolder.of(config)
    folder.last_path.unlink()  # resumes after the first epoch
    ranks = [World(rank, 1, torch.device("cpu")) for rank in (0, 1)]
    epochs, _ = build_epochs(config, ranks[0], build_source(config.dataset))
    epochs.world = epochs.trainer.world = ranks[1]
    epochs.figures[0]["top1"] = -1.0  # the second epoch becomes the best
    before = {path: path.read_bytes() for path in folder.path.rglob("*.*") if path.is_file()}
    with epochs.around(Logs()):
        epochs.fit()
    after = {path: path.read_bytes() for path in folder.path.rglob("*.*") if path.is_file()}
    assert after == before


def test_killed_ranks_are_described_by_their_signal():
    killed = ProcessFailure(local_rank=1, pid=7, exitcode=-9, error_file="none")
    assert _failure_line(killed) == "killed by SIGKILL"


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
    tmp_path: Path, sign: signal.Signals, more: list[str]
):
    args = [x for x in PLAIN if not x.startswith("recipe.epochs")]
    process = start(tmp_path, "name=mine", "recipe.epochs=1000", *args, *more)
    folder = RunFolder(tmp_path / "outputs/mine")
    wait_for(folder.last_path)
    os.killpg(process.pid, sign)  # as a terminal sends SIGINT, and a cluster SIGTERM
    _, err = process.communicate(timeout=400)
    assert process.returncode == 130
    (line,) = [x for x in err.splitlines() if x.startswith("train.py: ")]
    assert "interrupted" in line and "resume=auto" in line
    assert folder.read_summary()["status"] == "interrupted"
    steps, _ = folder.read_metrics()
    assert torch.load(folder.last_path, weights_only=True)["step"] == steps[-1]["step"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["devices=2"]], ids=["one process", "two ranks"])
def test_a_run_outlives_its_terminal_if_it_ignores_the_signal(tmp_path: Path, more: list[str]):
    terminal, end = os.openpty()
    args = [x for x in PLAIN if not x.startswith("recipe.epochs")]
    process = start(
        tmp_path,
        *("name=mine", "recipe.epochs=12", "checkpoint.every_epochs=1", *args, *more),
        stdout=end,
        ignored=[signal.SIGHUP],
    )
    os.close(end)
    folder = RunFolder(tmp_path / "outputs/mine")
    wait_for(folder.last_path)
    os.killpg(process.pid, signal.SIGHUP)
    os.close(terminal)
    _, err = process.communicate(timeout=400)
    assert (process.returncode, err) == (0, "")
    assert folder.read_summary()["status"] == "finished"


@pytest.mark.parametrize(("held_out", "ranks"), [(101, 1), (101, 2), (101, 3), (2, 3)])
def test_every_image_is_evaluated_once_for_any_number_of_ranks(held_out: int, ranks: int):
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
    # images loaded and readable, right, right among five of three classes
    assert together.totals[:4].tolist() == [held_out, held_out, right, held_out]


class Counted(World):
    """A rank that adds its sums to `totals`, shared by all ranks."""

    def __init__(self, rank: int = 0, size: int = 1, totals: torch.Tensor | None = None):
        super().__init__(rank, size, torch.device("cpu"))
        totals = torch.zeros(5, dtype=torch.float64) if totals is None else totals
        object.__setattr__(self, "totals", totals)

    totals: torch.Tensor

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.totals += values
        return torch.ones_like(values)


def start(
    tmp_path: Path,
    *args: str,
    stdout: int = subprocess.DEVNULL,
    ignored: Sequence[signal.Signals] = (),
) -> subprocess.Popen[str]:
    """Starts train.py in its own session."""

    def set_signals() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell ignores it in its background jobs
        for signum in ignored:
            signal.signal(signum, signal.SIG_IGN)

    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *args],
        cwd=tmp_path,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=set_signals,  # noqa: PLW1509
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 300  # machines are shared
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.1)


def test_count_includes_the_fifth_class_and_not_the_sixth():
    ranked = torch.arange(10.0).repeat(2, 1)  # class 9 is ranked first
    _, first, among_five, _ = _count(ranked, torch.tensor([5, 4])).tolist()
    assert (first, among_five) == (0, 1)
