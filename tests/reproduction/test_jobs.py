"""Many runs by one command: in turn, in processes, as tasks; stopped, repeated, named."""

import multiprocessing as mp
import os
import re
import signal
import time
from pathlib import Path

import pytest

from reproduction.application import objective
from reproduction.compose import plan_run
from reproduction.config import LONGEST_NAME
from reproduction.training.ranks import resolve_device
from tests.conftest import slow
from tests.images import OWN, disturbed
from tests.programs import (
    SHORT,
    SMALL,
    assert_refused,
    assert_succeeded,
    eventually,
    overrides_of,
    runs,
    same,
    snapshot,
    started,
    statuses,
    train,
    trained,
)

ONE = (SMALL, "recipe.epochs=1")
MINE = (OWN, SHORT)


@pytest.mark.parametrize("jobs", [[], slow(["jobs=2"])], ids=["in turn", "processes"])
def test_a_failed_run_ends_no_other_and_is_named_at_the_end(here: Path, jobs: list[str]):
    result = train("-m", jobs, "recipe.lr=1e30,0.001", ONE)
    told = "its output is in outputs/.logs" if jobs else "is kept as failed"
    assert_refused(result, told, status=1)
    assert sorted(statuses()) == ["failed", "finished"]
    assert "1 of 2 runs are finished" in result.out
    assert "report/lr-" in result.out
    if jobs:
        for run in runs():
            assert "epoch" in Path("outputs/.logs", f"{run.path.name}.log").read_text()
        (ours,) = [run for run in runs() if run.config["recipe"]["lr"] == 0.001]
        assert same(ours, trained("recipe.lr=0.001", ONE, root="alone")) == []


@pytest.mark.slow
def test_two_jobs_have_half_of_the_cores_each(here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0))
    assert cores > 1, "one core cannot be divided"
    assert_succeeded(train("-m", "jobs=3", "seed=0,1", ONE))
    for run in runs():
        (start,) = run.summary["starts"]
        assert start["threads"] == cores // 2
        assert f"({cores // 2} cores)" in start["hardware"]


def test_a_sweep_has_the_order_of_its_overrides(here: Path):
    """The last one changes fastest, whatever the names sort like."""
    sweep = (overrides_of("-m recipe.lr=0.2,0.1 seed=3,1"), ONE)
    shown = train(sweep, "dry_run=1").out
    points = re.findall(r"outputs/\S*-lr=(\S+?)-\S*-s(\d)-", shown)
    assert points == [("0.2", "3"), ("0.2", "1"), ("0.1", "3"), ("0.1", "1")]


def test_a_name_is_one_that_file_systems_allow():
    (name,) = re.findall(r"outputs/(\S+)", train("dry_run=1", f"recipe.lr=0.01{'0' * 300}").out)
    assert len(name) == LONGEST_NAME
    assert re.search(r"00-s0-\w+$", name)


DYING = """
import os, sys
if "LOKY_MAX_CPU_COUNT" in os.environ:
    os._exit(3)
"""


TELLING = DYING.replace("os._exit(3)", "sys.exit(os.environ['CUDA_VISIBLE_DEVICES'])")


def test_jobs_of_several_devices_have_gpus_of_their_own(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two of four each; a third job shares those of the first."""
    Path("sitecustomize.py").write_text(TELLING)
    monkeypatch.setenv("PYTHONPATH", str(here))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert train("-m", "jobs=3", "devices=2", "seed=0,1,2", ONE).status == 1
    logs = Path("outputs/.logs").glob("*.log")
    assert sorted(log.read_text().split()[-1] for log in logs) == ["0,1", "0,1", "2,3"]
    assert resolve_device("auto", devices=4) == "cuda"


def test_a_process_that_dies_in_silence_is_named(here: Path, monkeypatch: pytest.MonkeyPatch):
    Path("sitecustomize.py").write_text(DYING)
    monkeypatch.setenv("PYTHONPATH", str(here))
    result = train("-m", "jobs=2", "seed=0,1", ONE)
    assert result.status == 1
    assert result.err.count("ended with status 3; its output is in outputs/.logs") == 2


def test_a_task_is_one_run_and_a_dry_run_is_none(here: Path):
    sweep = ("-m", "seed=0,1,2", ONE)
    shown = train(sweep, "dry_run=1")
    assert_succeeded(shown, "3 runs: 3 not started")
    assert not snapshot()
    _, name, _ = re.findall(r"outputs/(\S+)", shown.out)
    assert "-s1-" in name
    assert "embed_dim=16" in name
    assert_succeeded(train(sweep, "task=1"))
    assert [run.path.name for run in runs()] == [name]
    shown = train(sweep, "dry_run=1", "resume=auto")
    assert_succeeded(shown, f"1:  finished: outputs/{name}\n")
    other = train(ONE, f"name='{name}'", "recipe.lr=9", "dry_run=1", "resume=auto")
    assert_refused(other, "holds another run")
    assert_refused(train(sweep, "task=3"), "task=3")
    assert_succeeded(train(sweep, "task=2", "hydra.sweep.subdir=job${hydra.job.num}"))
    assert "job2" in [run.path.name for run in runs()]


def test_an_interrupted_sweep_goes_on_with_the_same_command(here: Path):
    sweep = ("-m", "seed=0,1", MINE, "resume=auto")
    with disturbed("SIGINT", at=70):
        result = train(sweep)
    assert result.status == 130
    assert "0 of 2 runs are finished" in result.out
    assert "1 interrupted" in result.out
    assert statuses() == ["interrupted"]
    assert 0 < runs()[0].checkpoint()["step"] < 6
    assert_succeeded(train(sweep))
    assert statuses() == ["finished"] * 2
    whole = trained("seed=0", MINE, name="whole", root="other")
    assert same(runs()[0], whole) == []


def test_a_sweeper_chooses_by_the_last_epoch(here: Path):
    first, last = trained(SMALL).epochs
    point = plan_run(SMALL).at(Path("outputs/mine"))
    assert objective(point, "eval_loss") == last["eval_loss"] != first["eval_loss"]
    assert objective(point, "val_loss") is None


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_saves_all_processes_and_a_second_ends_them(here: Path, times: int):
    overrides = (overrides_of("-m jobs=2 seed=0,1,2"), SMALL, "recipe.epochs=4000", "resume=auto")
    with started(overrides) as sweep:
        eventually(lambda: len([run for run in runs() if len(run.steps) > 3]) == 2)
        for _ in range(times):
            sweep.send_signal(signal.SIGINT)
            time.sleep(0.02)
        eventually(lambda: sweep.poll() is not None)
    assert sweep.returncode == 130
    # one that is killed wrote no status: its lock, which is free, tells
    assert len(runs()) == 2
    if times == 1:
        assert statuses() == ["interrupted"] * 2
        assert all(run.checkpoints for run in runs())
    shown = train("-m", "seed=0,1,2", SMALL, "recipe.epochs=4000", "resume=auto", "dry_run=1").out
    assert "2 interrupted, 1 not started" in shown


def test_one_process_at_a_time_trains_a_run(here: Path):
    overrides = ("name=mine", SMALL, "recipe.epochs=4000", "resume=auto")
    other = mp.get_context("fork").Process(target=train, args=overrides)
    other.start()
    try:
        eventually(lambda: Path("outputs/mine/metrics.jsonl").exists())
        assert_refused(train(overrides), "mine", "process")
        assert "running" in train(overrides, "dry_run=1").out
    finally:
        other.kill()
        other.join()
    assert "interrupted" in train(overrides, "dry_run=1").out
