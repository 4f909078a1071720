"""Studies defined by a file: their runs, and refused files."""

import shutil
from pathlib import Path

import pytest
import yaml

from reproduction.studies.own import plan_own, read_study
from reproduction.studies.plan import Settings
from reproduction.system.errors import UserError

RESULTS = Path(__file__).parents[2] / "results"
FIRST = RESULTS / "cifar10_5k.yaml"


def changed(tmp_path: Path, **values: object) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(FIRST.read_text()) | values))
    return path


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_plan_own_orders_runs_by_seed(path: Path, tmp_path: Path):
    study = read_study(path)
    runs = plan_own(path, Settings(outputs=str(tmp_path)))
    assert len({run.name for run in runs}) == len(runs) == study.seeds * len(study.stacks)
    assert [run.config.seed for run in runs] == sorted(run.config.seed for run in runs)
    for run in runs:
        (stack,) = run.labels
        assert "+".join(run.config.augmentation.stack) in (stack, "" if stack == "none" else stack)
        assert run.name.startswith(f"{path.stem}-{stack}-s{run.config.seed}-")


def test_plan_own_keeps_the_name_of_an_existing_run(tmp_path: Path):
    settings = Settings(outputs=str(tmp_path))
    first, *_ = plan_own(FIRST, settings, seeds=1)
    first.folder.create(first.config)
    shutil.move(first.folder.path, tmp_path / "mine")
    again, *others = plan_own(FIRST, settings, seeds=1)
    assert again.name == "mine" and len(others) == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"contrasts": [{"of": "htm", "against": "nothing"}]}, "nothing is no stack, allowed: "),
        ({"seeds": 0}, "seeds: "),
        ({"stack": {}}, "stack: "),
        ({"overrides": ["recipe.lrr=1"]}, "recipe.lrr: unknown key"),
        ({"overrides": ["seed=3"]}, "seed=3: a study must not set seed"),
        ({"stacks": {"none": ["seed=7"]}, "contrasts": []}, "seed=7: a study must not set seed"),
        ({"overrides": ["+devices=2"]}, "a study must not set devices"),
    ],
)
def test_invalid_study_files_are_refused(values, message: str, tmp_path: Path):
    with pytest.raises(UserError, match=message):
        plan_own(changed(tmp_path, **values), Settings(outputs=str(tmp_path)))


def test_study_files_fix_scale_and_data_set(tmp_path: Path):
    with pytest.raises(UserError, match="scale=smoke: allowed is full"):
        plan_own(FIRST, Settings(scale="smoke", outputs=str(tmp_path)))
    with pytest.raises(UserError, match="fixes its data set"):
        plan_own(FIRST, Settings(dataset="digits", outputs=str(tmp_path)))


def test_openmixup_study_at_smoke_scale_uses_stand_ins(tmp_path: Path):
    path, settings = RESULTS / "openmixup_cifar100.yaml", Settings(scale="smoke", outputs="x")
    runs = plan_own(path, settings)
    assert len(runs) == 4 and {run.config.seed for run in runs} == {0}
    for run in runs:
        assert run.config.dataset.root == "x/smoke/data/cifar100"
        htm = run.config.augmentation.htm
        assert htm is None or (htm.tau, htm.rho) == (float("inf"), 0)
        assert run.config.recipe.clip_grad_norm == 5 and run.config.recipe.epochs == 2
