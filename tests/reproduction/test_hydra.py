"""train.py is an application of Hydra: its flags, grammar and groups, and files elsewhere."""

from pathlib import Path

import pytest
import yaml

from tests.conftest import slow
from tests.programs import (
    SMALL,
    Run,
    assert_succeeded,
    overrides_of,
    runs,
    script,
    train,
)

pytestmark = pytest.mark.usefixtures("here")
SHOWN = {  # command -> what it prints
    "--help": "precision: float32",
    "--hydra-help": "Hydra (1.3",
    "--cfg hydra": "hydra_plugins.checked.GridSweeper",
    "--cfg job --resolve": "    layer: 1",
    "--info defaults": "augmentation/htm",
    "-sc install=bash": "complete",
    "--run hydra.verbose=true dry_run=1": "1 run:",
    "-m seed=shuffle(range(3)) dry_run=1": "3 runs:",
    "-m model=glob(cct_2*) dry_run=1": "1 run:",
    "~checkpoint.every_minutes dry_run=1": "1 run:",
    "+logger.wandb.tags=[a] logger=wandb dry_run=1": "1 run:",
    "++seed=3 augmentation=[cutmix,mixup] dry_run=1": "/cct_2_3x2-digits-mixup+cutmix-s3-",
    "augmentation=[] recipe.lr=1e-3 dry_run=1": "/cct_2_3x2-digits-plain-lr=1e-3-s0-",
    "experiment=table1/cifar10_htm dry_run=1": "outputs/table1-cifar10_htm-s0-",
    "-cd own experiment=own dry_run=1": "outputs/own-s0-",
    "--config-dir own --config-name own dry_run=1": "-s7-",
    "-m -cd own -cn own recipe.lr=0.1,0.2 dry_run=1": "2 runs:",
    "hydra.searchpath=[file://own] experiment=own dry_run=1": "outputs/own-s0-",
    "-m hydra.searchpath=[file://own] experiment=own seed=0,1 dry_run=1": "outputs/own-s1-",
}


def write_own_files() -> None:
    """An experiment and a primary configuration in another folder."""
    Path("own/experiment").mkdir(parents=True)
    experiment = {"defaults": [{"override /augmentation": ["htm"]}], "recipe": {"epochs": 1}}
    text = f"# @package _global_\n{yaml.safe_dump(experiment)}"
    Path("own/experiment/own.yaml").write_text(text)
    Path("own/own.yaml").write_text("defaults: [train, _self_]\nseed: 7\n")


@pytest.mark.parametrize("command", SHOWN)
def test_a_habit_of_hydra_works(command: str):
    write_own_files()
    result = train(command.replace("file://", f"file://{Path.cwd()}/").split())
    assert_succeeded(result)
    assert SHOWN[command] in result.out + result.err
    assert list(Path().iterdir()) == [Path("own")]


@pytest.mark.parametrize(
    ("typed", "option"), [("model=cct_2", "model=cct_2_3x2"), ("hydra/sweeper=gr", "grid")]
)
def test_the_shell_completes(typed: str, option: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COMP_LINE", f"python train.py {typed}")
    assert option in train("-sc", "query=bash").out


def test_a_sweep_ends_in_one_table_and_goes_on():
    sweep = (overrides_of("-m seed=0,1"), SMALL, "recipe.epochs=1", "resume=auto")
    assert_succeeded(train(sweep), "2 of 2 runs are finished")
    seconds = [run.summary["seconds"] for run in runs()]
    assert_succeeded(train(sweep), "2 of 2 runs are finished")
    assert [run.summary["seconds"] for run in runs()] == seconds
    failed = train(sweep, "recipe.lr=1e30,0.001")
    assert failed.status == 1
    assert failed.err.count("is kept as failed") == 2


@pytest.mark.parametrize("jobs", [[], slow(["jobs=2"])])
def test_the_overrides_of_a_run_are_recorded(jobs: list[str]):
    write_own_files()
    overrides = ("seed=1", "name=its ${seed} of ${now:%f}", "experiment=own", SMALL)
    assert_succeeded(train("-m", "-cd", "own", jobs, overrides), "1 of 1 runs are finished")
    (run,) = runs()
    summary = run.summary
    assert summary["overrides"][0] == "seed=1"
    assert "--config-dir" in summary["command"]
    assert "seed=1" in summary["command"]


def test_a_study_is_a_sweeper():
    study = "table1/cifar100_htm"
    shown = train("-m", "hydra/sweeper=study", f"hydra.sweeper.study={study}", "dry_run=1").out
    assert shown == script("reproduce", study, "dry_run=1").out
    assert "3 runs:" in shown


def test_the_directory_of_a_run_is_hydras():
    of_hydra = overrides_of("hydra.run.dir=there hydra.job.chdir=true hydra.output_subdir=null")
    assert_succeeded(train(SMALL, of_hydra), "there: top-1")
    assert Run("there").summary["name"] == "there"
