"""Launchers and sweepers that are plugins of Hydra's run, stop, requeue and choose as ours do."""

import json
import os
from pathlib import Path

import pytest
import yaml

from tests.doors import (
    SHORT,
    SMALL,
    Run,
    assert_refused,
    assert_succeeded,
    run,
    runs,
    same,
    statuses,
    train,
    trained,
    words_of,
)
from tests.images import OWN, disturbed

pytestmark = pytest.mark.usefixtures("here")
LAUNCHERS = ("joblib", "submitit_local")
ONE = (SMALL, "recipe.epochs=1", "resume=auto")
MINE = (OWN, SHORT, "resume=auto")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_runs_a_sweep_once_and_ends_in_one_table(launcher: str):
    sweep = ("-m", f"hydra/launcher={launcher}", "seed=0,1", "name=it's ${seed} ${recipe.lr}", ONE)
    failed = train(sweep, "recipe.lr=1e30,0.001", apart=True)
    assert failed.status == 1, failed
    assert "2 of 4 runs are finished" in failed.out
    assert failed.err.count("is kept as failed") == 2
    assert sorted(statuses()) == ["failed"] * 2 + ["finished"] * 2
    again = train(sweep, "recipe.lr=0.001", apart=True)
    assert_succeeded(again)
    assert again.out.count("2 of 2 runs are finished") == 1
    assert_refused(train(sweep, "recipe.lr=0.001,-1"), "recipe.lr=-1")
    assert len(runs()) == 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing has disturbed."""
    return trained(MINE, root=tmp_path_factory.mktemp("whole"))


ANSWERS = [  # what squeue says of the job after a signal to its run, and how the run ends
    ("SIGUSR2", "exit 1", "finished"),
    ("SIGTERM", "exit 1", "interrupted"),
    ("SIGTERM", "echo 5 RUNNING", "finished"),
    ("SIGUSR1", "echo 5 RUNNING", "finished"),
    ("SIGTERM", "echo 5 COMPLETING", "interrupted"),
    ("SIGTERM", "sleep 60", "interrupted"),
    ("SIGKILL", "echo 5 RUNNING", "interrupted"),
]


@pytest.mark.parametrize(("signal", "answer", "state"), ANSWERS)
def test_a_job_is_queued_again_or_its_folder_tells_its_end_and_it_goes_on(
    signal: str,
    answer: str,
    state: str,
    whole: Run,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    (here / "squeue").write_text(f"#!/bin/sh\n{answer}\n")
    (here / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    sweep = (words_of("-m hydra/launcher=submitit_local"), MINE)
    with disturbed(signal, at=70):
        result = train(sweep, apart=True)
    assert result.status == (state != "finished"), result
    assert len(result.lines) == (state == "interrupted")
    told = "1 of 1 runs are finished" if state == "finished" else "1 interrupted"
    assert told in result.out
    assert_succeeded(train(sweep))
    (run,) = runs()
    assert same(run, whole) == []


def test_optuna_chooses_on_a_validation_split_and_repeats_no_run():
    sweep = (
        words_of("""
            -m hydra/sweeper=optuna hydra.sweeper.direction=maximize hydra.sweeper.n_trials=4
            hydra.sweeper.n_jobs=2 hydra.sweeper.sampler.seed=1 augmentation.htm.tau=interval(1.5,3)
            augmentation.htm.rho=choice(0,0.01)
        """),
        ONE,
    )
    refused = train(sweep, apart=True)
    assert refused.status == 2
    assert "dataset.validation" in refused.lines[-1]  # Optuna has told of its study before
    assert runs() == []
    in_jobs = (sweep, "dataset.validation=0.2", "hydra/launcher=submitit_local")
    assert_succeeded(train(in_jobs, apart=True), "4 of 4 runs are finished")
    (path,) = Path("outputs/.sweeps").glob("*/optimization_results.yaml")
    assert best_value(path) == max(run.summary["val_top1_last"] for run in runs())
    seconds = [run.summary["seconds"] for run in runs()]
    assert_succeeded(train(sweep, "dataset.validation=0.2", apart=True))
    assert [run.summary["seconds"] for run in runs()] == seconds
    assert_succeeded(train(sweep, "dataset.validation=0.2", "objective=val_loss", apart=True))
    newest = max(Path("outputs/.sweeps").glob("*/optimization_results.yaml"))
    assert best_value(newest) == max(run.summary["log"][-1]["val_loss"] for run in runs())


def best_value(path: Path) -> float:
    return yaml.safe_load(path.read_text())["best_value"]


def test_a_study_is_trained_by_another_launcher():
    rows = {"plain": ["augmentation=[]"], "htm": ["augmentation=[htm]"]}
    Path("mine.yaml").write_text(json.dumps({"title": "Two", "rows": rows, "seeds": 2}))
    words = ("mine.yaml", "hydra/launcher=submitit_local", ONE[:-1])
    assert_succeeded(run("scripts/reproduce.py", words, apart=True), "4 of 4 runs are finished")
    names = {run.path.name.partition("-s")[0] for run in runs()}
    assert names == {"mine-plain", "mine-htm"}
