"""Launchers and sweepers that are plugins of Hydra's run, stop, requeue and choose as ours do."""

import json
from pathlib import Path

import pytest
import yaml

from tests.doors import SMALL, Run, run, runs, same, train
from tests.images import OWN, disturbed

pytestmark = pytest.mark.usefixtures("here")
LAUNCHERS = ("joblib", "submitit_local")
ONE = (*SMALL, "recipe.epochs=1", "resume=auto")
MINE = (*OWN, *(word for word in SMALL if "limit" not in word), "resume=auto")


def statuses() -> list[str]:
    return [run.summary["status"] for run in runs()]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_runs_a_sweep_once_and_ends_in_one_table(launcher: str):
    sweep = ("-m", f"hydra/launcher={launcher}", "seed=0,1", "name=it's ${seed} ${recipe.lr}", *ONE)
    failed = train(*sweep, "recipe.lr=1e30,0.001", apart=True)
    assert failed.status == 1 and "2 of 4 runs are finished" in failed.out, failed
    assert failed.err.count("is kept as failed") == 2
    assert sorted(statuses()) == ["failed"] * 2 + ["finished"] * 2
    again = train(*sweep, "recipe.lr=0.001", apart=True)
    assert again.status == 0
    assert again.out.count("2 of 2 runs are finished") == 1
    refused = train(*sweep, "recipe.lr=0.001,-1")
    assert refused.status == 2
    assert "recipe.lr=-1" in refused.err
    assert len(runs()) == 4


@pytest.mark.parametrize("signal", ["SIGUSR2", "SIGTERM"])
def test_submitit_requeues_a_run_and_one_that_is_ended_goes_on(signal: str):
    sweep = ("-m", "hydra/launcher=submitit_local", "seed=0,1", *MINE)
    with disturbed(signal, at=70):
        result = train(*sweep, apart=True)
    expected = {"SIGUSR2": (0, "finished"), "SIGTERM": (1, "interrupted")}[signal]
    assert (result.status, *{*statuses()}) == expected, result
    assert train(*sweep, apart=True).status == 0
    assert statuses() == ["finished"] * 2
    whole = train("name=whole", "output_root=other", "seed=0", *MINE)
    assert whole.status == 0
    assert same(runs()[0], Run("other/whole")) == []


def test_optuna_chooses_on_a_validation_split_and_repeats_no_run():
    sweep = (
        *("-m", "hydra/sweeper=optuna", "hydra.sweeper.direction=maximize"),
        *("hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=2", "hydra.sweeper.sampler.seed=1"),
        *("augmentation.htm.tau=interval(1.5,3)", "augmentation.htm.rho=choice(0,0.01)", *ONE),
    )
    refused = train(*sweep, apart=True)
    assert refused.status == 2
    assert "dataset.validation" in refused.err
    assert runs() == []
    first = train(*sweep, "dataset.validation=0.2", apart=True)
    assert first.status == 0 and "4 of 4 runs are finished" in first.out, first
    (path,) = Path("outputs/.sweeps").glob("*/optimization_results.yaml")
    best = yaml.safe_load(path.read_text())
    assert best["best_value"] == max(run.summary["val_top1_last"] for run in runs())
    seconds = [run.summary["seconds"] for run in runs()]
    assert train(*sweep, "dataset.validation=0.2", apart=True).status == 0
    assert [run.summary["seconds"] for run in runs()] == seconds
    loss = train(*sweep, "dataset.validation=0.2", "objective=val_loss", apart=True)
    results = max(Path("outputs/.sweeps").glob("*/optimization_results.yaml"))
    lowest = max(run.summary["log"][-1]["val_loss"] for run in runs())
    assert loss.status == 0
    assert yaml.safe_load(results.read_text())["best_value"] == lowest


def test_a_study_is_trained_by_another_launcher():
    rows = {"plain": ["augmentation=[]"], "htm": ["augmentation=[htm]"]}
    Path("mine.yaml").write_text(json.dumps({"title": "Two", "rows": rows, "seeds": 2}))
    words = ("mine.yaml", "hydra/launcher=submitit_local", *ONE[:-1])
    result = run("scripts/reproduce.py", *words, apart=True)
    assert result.status == 0 and "4 of 4 runs are finished" in result.out, result
    assert {run.path.name.partition("-s")[0] for run in runs()} == {"mine-plain", "mine-htm"}
