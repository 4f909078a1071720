"""Plugins of Hydra work: its joblib launcher under our sweepers, and Optuna's sweeper."""

import json
from pathlib import Path

import pytest
import yaml

from tests.programs import (
    SMALL,
    assert_succeeded,
    cells,
    overrides_of,
    runs,
    script,
    statuses,
    train,
)

pytestmark = pytest.mark.usefixtures("here")
ONE = (SMALL, "recipe.epochs=1", "resume=auto")
JOBLIB = "hydra/launcher=joblib"
OPTUNA = overrides_of("""
    -m hydra/sweeper=optuna hydra.sweeper.direction=maximize hydra.sweeper.n_trials=3
    hydra.sweeper.n_jobs=2 hydra.sweeper.sampler.seed=1 augmentation.htm.tau=interval(1.5,3)
    augmentation.htm.rho=choice(0,0.01) dataset.validation=0.2
""")


def test_a_sweep_by_joblib_ends_in_our_table_and_goes_on():
    sweep = ("-m", JOBLIB, ONE)
    failed = train(sweep, "recipe.lr=1e30,0.001", apart=True)
    assert failed.status == 1, failed
    assert "1 of 2 runs are finished, 1 failed" in failed.out
    assert sorted(statuses()) == ["failed", "finished"]
    again = train(sweep, "recipe.lr=0.001", apart=True)
    assert_succeeded(again, "1 of 1 runs are finished")
    refused = train(sweep, "recipe.lr=0.001,-1", apart=True)
    assert refused.status == 2
    assert len(runs()) == 2


def test_a_study_is_trained_by_joblib():
    rows = {"plain": ["augmentation=[]"], "htm": ["augmentation=[htm]"]}
    Path("mine.yaml").write_text(json.dumps({"title": "Two", "rows": rows, "seeds": 1}))
    trained = script("reproduce", "mine.yaml", JOBLIB, ONE, apart=True)
    assert_succeeded(trained, "2 of 2 runs are finished")
    assert {run.path.name.partition("-s")[0] for run in runs()} == {"mine-plain", "mine-htm"}


@pytest.mark.parametrize(
    ("objective", "launcher"), [("val_top1", "jobs=2"), ("val_loss", "hydra/launcher=basic")]
)
def test_optuna_chooses_by_the_objective_and_its_runs_have_a_table(objective: str, launcher: str):
    chosen = train(OPTUNA, ONE, f"objective={objective}", launcher, apart=True)
    assert_succeeded(chosen)
    best = yaml.safe_load(Path("outputs/optimization_results.yaml").read_text())["best_value"]
    assert best == max(run.summary["log"][-1][objective] for run in runs())
    table = script("runs", "outputs")
    assert_succeeded(table)
    assert len(cells(table.out)) == 1 + len(runs())
