"""Published results: result files, weight folders and the results page."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from scipy.stats import ttest_rel

from reproduction.runs.folder import RunFolder
from reproduction.studies.own import plan_own
from reproduction.studies.plan import Settings, point_configs
from reproduction.studies.results import (
    METRICS,
    RESULTS,
    WEIGHTS,
    publish,
    read_results,
    results_page,
    stored,
    write_study_report,
)
from reproduction.system.errors import UserError
from tests.reproduction.conftest import SMALL, Command

UNEVEN = ["recipe.batch_size=40"]  # of 60 images: two batches of 30
FIRST = RESULTS / "cifar10_5k.yaml"


def test_published_folder_evaluates_without_other_arguments(command: Command, tmp_path: Path):
    """Also after it is moved; its result equals the run's files."""
    assert command("train", "name=mine", "augmentation.htm.tau=inf", *SMALL, *UNEVEN).status == 0
    run = RunFolder(tmp_path / "outputs/mine")
    path = publish(run.path, tmp_path / "results", tmp_path / "hub")
    moved = shutil.move(tmp_path / "hub", tmp_path / "elsewhere")
    (result,) = read_results(path.parent)
    summary = run.read_summary()
    assert {key: result[key] for key in METRICS} == {key: summary[key] for key in METRICS}
    assert result["log"] == run.read_metrics()[1]
    assert result["threads"] == torch.get_num_threads()
    assert result["mixed_share"] == 1 and result["config"]["augmentation.htm.tau"] == "inf"
    digest = hashlib.sha256(Path(moved, WEIGHTS).read_bytes()).hexdigest()
    assert result["weights_sha256"] == digest
    assert str(tmp_path) not in "".join(x.read_text() for x in [path, *Path(moved).glob("[!m]*")])
    shutil.rmtree(run.path)
    assert command("eval", f"checkpoint={moved}").status == 0
    evaluation = json.loads(Path(moved, "evaluation-model.json").read_text())
    assert {evaluation[key] for key in ("top1", "top5")} == {
        summary["top1_last"],
        summary["top5_last"],
    }
    assert "not allowed here" in command("eval", f"checkpoint={moved}", "model=resnet18").err


def test_publish_refuses_existing_folders_and_unfinished_runs(command: Command, tmp_path: Path):
    assert command("train", "name=mine", *SMALL).status == 0
    run = RunFolder(tmp_path / "outputs/mine")
    with pytest.raises(UserError, match="exists already"):
        publish(run.path, tmp_path / "results", tmp_path / "outputs")
    run.write_summary(status="interrupted")
    with pytest.raises(UserError, match="is not finished"):
        publish(run.path, tmp_path / "results", tmp_path / "hub")
    assert not (tmp_path / "results").exists() and not (tmp_path / "hub").exists()
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UserError, match="holds no result"):
        read_results(tmp_path)


def test_study_report_omits_runs_with_incomplete_results(tmp_path: Path):
    settings = Settings(outputs=str(tmp_path))
    first, *_ = planned = plan_own(FIRST, settings)
    first.folder.create(first.config)
    first.folder.write_summary(status="finished", top1_last=50.0)
    report = write_study_report(FIRST, settings, planned).read_text()
    assert f"A run is left out. {first.folder.path}: incomplete result: " in report
    assert "0 of 25 runs are finished" in report


def result_of(name: str, config: Any, top1: float) -> dict[str, Any]:
    values = {**dict.fromkeys(METRICS, 90.0), "top1_last": top1, "hours": 0.5, "mixed_share": 0.25}
    values |= {"epochs": 50, "log": [{"epoch": 40, "top1": 99.0}, {"epoch": 50, "top1": top1}]}
    return {"name": name, "seed": config.seed, "config": stored(config), **values}


def test_results_page_compares_the_runs_of_a_study_over_seeds(tmp_path: Path):
    shutil.copy(FIRST, tmp_path)
    rows = {"none": [50, 51, 53, 52], "htm": [54, 55, 58, 56], "vtm": [50, 52, 53, 51]}
    for run in plan_own(FIRST, Settings(outputs=str(tmp_path))):
        (stack,) = run.labels
        top1 = rows.get(stack, [60, 61, 62, 63])
        if run.config.seed < 4:
            result = result_of(run.name, run.config, top1[run.config.seed])
            (tmp_path / f"{run.name}.json").write_text(json.dumps(result))
        else:  # another recipe is not counted
            other = replace(run.config, recipe=replace(run.config.recipe, lr=1.0))
            (tmp_path / f"{run.name}.json").write_text(json.dumps(result_of(run.name, other, 99.0)))
    page = results_page(tmp_path)
    assert "20 of 25 runs are finished, 4 of 5 rounds are complete." in page
    assert "| htm | 4 | 55.75 +/- 1.71 | 55.75 +/- 1.71 | 90.00 +/- 0.00 | 25 % | 2.0 |" in page
    p = ttest_rel(rows["htm"], rows["none"]).pvalue
    assert f"| htm - none | 4 | +4.25 | {p:.1e} | {3 * p:.3f} | significant at 5 % |" in page
    p = ttest_rel(rows["vtm"], rows["none"]).pvalue
    assert f"| vtm - none | 4 | +0.00 | {p:.3f} | 1.000 | not significant |" in page
    assert "values are identical | 1.000 | not significant |" in page
    for path in tmp_path.glob("*-s[23]-*.json"):
        path.unlink()
    page = results_page(tmp_path)
    assert "2 of 5 rounds are complete" in page and "no difference is tested yet" in page
    assert " p " not in page.partition("## HTM and VTM")[2]


def test_results_page_counts_only_runs_of_a_cell(tmp_path: Path):
    cell = point_configs("table1", Settings(data="elsewhere"))["table1/cifar10_htm"]
    for seed, top1 in enumerate((97.0, 98.0)):
        result = result_of(f"some-{seed}", replace(cell, seed=seed), top1)
        (tmp_path / f"some-{seed}.json").write_text(json.dumps(result))
    lines = [line for line in results_page(tmp_path).splitlines() if line.startswith("| 1 |")]
    ours = [line for line in lines if "not run" not in line]
    assert len(lines) == 8
    (line,) = ours
    assert "| 97.57 | 97.50 +/- 0.71 | 2 | 1.0 | `python train.py" in line


def test_stored_results_belong_to_their_study_and_name_no_machine():
    runs = [run for path in sorted(RESULTS.glob("*.yaml")) for run in plan_own(path, Settings())]
    planned = {run.name.rpartition("-")[0]: run for run in runs}
    for result in read_results():
        run = planned[result["name"].rpartition("-")[0]]
        assert result["seed"] == run.config.seed
        assert not Path(str(result["config"].get("dataset.root", "."))).is_absolute()
    assert yaml.safe_load(FIRST.read_text())["seeds"] == 5
