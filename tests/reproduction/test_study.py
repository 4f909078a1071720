"""Studies as files, and the plans of their runs: counts, folders, scales, refusals."""

import dataclasses
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from sklearn.datasets import load_digits

from reproduction.runs.folder import RunFolder, find_runs
from reproduction.runs.identity import default_name, run_hash
from reproduction.runs.parse import parse
from reproduction.studies import study as module
from reproduction.studies.plan import keys_of, names, plan, points_of, studies_of
from reproduction.studies.publish import OTHERS, _study_of
from reproduction.studies.study import Settings, papers_studies, read_study, rows_at_scale, scales
from reproduction.system.errors import UserError
from scripts import write_digits
from tests.reproduction.conftest import config_of

RESULTS = Path(__file__).parents[2] / "results"
FIRST = RESULTS / "cifar10_5k.yaml"
# Runs per seed of each study, at full scale and on the digits.
COUNTS = {
    "table1": (8, 4),
    "table2": (4, 0),
    "table3": (3, 3),
    "table4": (5, 5),
    "table5": (9, 9),
    "figure3": (1, 1),
    "figure4": (1, 1),
    "sweep-tau": (8, 8),
    "sweep-rho": (7, 7),
    "sweep-kappa": (9, 7),
    "all": (42, 32),
}


SLOW = [pytest.param(scale, marks=pytest.mark.slow) for scale in ("short", "digits")]


@pytest.mark.parametrize("scale", ["full", "smoke", *SLOW])
def test_plans_have_the_recorded_numbers_of_runs(scale: str):
    for name, (full, digits) in COUNTS.items():
        expected = digits if scale == "digits" else full
        if (scale, name) == ("smoke", "table4"):
            expected = 4  # with tau=inf the row without ScoreNet is the full one
        if not expected:
            with pytest.raises(UserError, match="study=table2: has no rows at digits scale"):
                plan(name, Settings(scale=scale))
            continue
        settings = Settings(scale=scale, outputs="nowhere")
        seeds = 1 if name == "figure3" else scales()[scale].seeds
        runs = plan(name, settings)
        assert len(runs) == expected * seeds, name
        assert len({run.name for run in runs}) == len(runs)
        assert [run.config.seed for run in runs] == sorted(run.config.seed for run in runs)
        assert {run.config.output_root for run in runs} == {str(settings.root)}


@pytest.mark.parametrize("scale", ["full", "smoke", SLOW[-1]])
def test_command_line_of_a_run_composes_its_configuration(scale: str):
    for run in plan("sweep-kappa", Settings(scale=scale, data=None), 1)[:3]:
        config = config_of(*run.overrides, needs_data=False)
        assert config == run.config and run_hash(config) == run_hash(run.config)


def test_a_run_is_named_after_the_first_row_and_what_a_sweep_changes(tmp_path: Path):
    settings = Settings(outputs=str(tmp_path))
    _, attention, _ = plan("table3", settings, 1)
    assert attention.name.startswith("table1-cifar100_htm-s0-")
    folders = [run.name.rsplit("-", 2)[0] for run in plan("sweep-tau", settings, 1)]
    assert folders[:2] == ["table1-cifar100_htm-tau=0", "table1-cifar100_htm-tau=0.5"]
    assert folders[4] == "table1-cifar100_htm"  # the paper's own value
    attention.folder.create(attention.config)
    shutil.move(attention.folder.path, tmp_path / "mine")
    assert [run.name for run in plan("table3", settings, 1)][1] == "mine"


def test_default_names_have_plain_characters_and_a_limit():
    config = config_of()
    name = default_name(
        config, None, ["augmentation.htm.tau=0.5", "recipe.transforms.scale=[1, 1]"]
    )
    assert name.startswith("cct_2_3x2-digits-htm+vtm-tau=0.5-scale=1+1-s0-")
    long = default_name(config, None, [f"recipe.transforms.ratio={'9' * 300}"])
    assert len(long) == 120 and long.endswith(f"-s0-{run_hash(config)}")


def test_rows_of_one_configuration_share_their_runs():
    labels = [run.labels for run in plan("all", Settings(outputs="nowhere"), 1)]
    assert ("table3/random", "table4/without_tokens") in labels
    shared = next(names for names in labels if "table1/cifar100_htm" in names)
    assert {"table3/attention", "table4/full", "sweep-tau/tau=2", "sweep-rho/rho=0.005"} <= {
        *shared
    }


def test_settings_replace_data_sets_devices_and_epochs():
    other = Settings(scale="short", dataset="image_folder", data="mine", devices=2)
    configs = [point.config for name in ("table1", "table2") for point in _points(other, name)]
    assert {(x.dataset.name, x.dataset.root, x.devices) for x in configs} == {
        ("image_folder", "mine", 2)
    }
    assert {x.recipe.epochs for x in configs} == {151, 3}


def _points(settings: Settings, name: str = "all") -> list[Any]:
    return points_of(studies_of(name), settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": "huge"}, "scale=huge: must be one of full, short, smoke, digits"),
        ({"dataset": "image_folder"}, "name the folder of images as well"),
        (
            {"scale": "digits", "dataset": "cifar10"},
            "always uses digits, leave dataset and data out",
        ),
        ({"scale": "digits", "data": "x"}, "always uses digits"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, str], message: str):
    with pytest.raises(UserError, match=message):
        Settings(**settings)


def test_unknown_study_is_refused_with_the_known_ones():
    with pytest.raises(
        UserError, match=r"study=table6: must be one of table1, .*, all, or an exist"
    ):
        plan("table6", Settings())
    assert [*COUNTS][5:7] == [name for name in names() if name.startswith("figure")][:2]


def test_sweeps_and_sizes_fit_the_tables():
    for name, study in papers_studies().items():
        rows = rows_at_scale(study)
        assert all(row.row for row in rows.values()), name
        assert set(study.sizes) >= {row.row for row in rows.values()} or not study.sizes
        assert {figure.of for figure in study.figures.values()} <= set(rows)
    (own,) = (x for x in _points(Settings()) if x.label == "sweep-kappa/kappa=80")
    assert own.row.row == "80 (as in Table 1)" and own.row.printed["top1"] == 83.54


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_own_studies_are_planned_seed_by_seed(path: Path, tmp_path: Path):
    study = read_study(path)
    if any(row.is_open for row in study.rows.values()):
        with pytest.raises(UserError, match=r"rows.*-excess: has a value \?\?\?, which its pilot"):
            plan(str(path), Settings(outputs=str(tmp_path)))
        text = path.read_text().replace("=???", "=0.6")  # as the pilot may choose
        path = tmp_path / path.name
        path.write_text(text)
    runs = plan(str(path), Settings(outputs=str(tmp_path)))
    assert len({run.name for run in runs}) == len(runs) == (study.seeds or 0) * len(study.rows)
    seeds = range(study.first_seed, study.first_seed + (study.seeds or 0))
    assert {run.config.seed for run in runs} == {*seeds}
    for run in runs:
        (label,) = run.labels
        row = label.partition("/")[2]
        stack = row.partition("-")[0].replace("none", "")
        assert "+".join(run.config.augmentation.stack) == stack
        assert run.name.startswith(f"{path.stem}-{row}-s{run.config.seed}-")


def test_equal_rows_of_two_studies_are_told_apart_by_their_seeds():
    names = ("cifar10_1k", "cifar10_1k_labels")
    first, second = (_points(Settings(), str(RESULTS / f"{name}.yaml")) for name in names)
    (key,) = {x.key for points in (first, second) for x in points if x.name == "mixup+cutmix"}
    found = [_study_of(key, seed, RESULTS) for seed in (0, 9, 10, 21, 22)]
    assert found == [names[0], names[0], names[1], names[1], OTHERS]


def changed(tmp_path: Path, **values: object) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(FIRST.read_text()) | values))
    return path


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rows": {"htm": {"against": "nothing"}}},
            r"rows.htm.against=nothing: must be one of htm",
        ),
        ({"rows": {"htm": {"against": "table9/x"}}}, "against=table9/x: must be one of"),
        ({"rows": {}}, "rows: must name one row at least"),
        (
            {"sweep": {"key": "recipe.lr", "values": [1], "own": "table1/cifar100_htm"}},
            "at least; sweeps are the paper's",
        ),
        ({"rows": {"a/b": []}}, "rows.a/b"),
        ({"seeds": 0}, "seeds: "),
        ({"looks": {3: 0.01, 4: 0.04}}, "looks: the last must be at seeds=5"),
        ({"looks": {5: 4}}, "looks.5: "),
        (
            {"rows": {"none": ["recipe.lr=???"], "htm": {"against": "none"}}},
            r"rows.htm.against=none: must be one of htm, or",
        ),
        ({"row": {}}, "row: unknown key, perhaps rows"),
        ({"rows": {"a": {"override": []}}}, "rows.a.override: unknown key, perhaps overrides"),
        (
            {"sizes": {"s": {"model": "x", "classes": 10, "counted": [1, 2, 3], "param": 1}}},
            "sizes.s.param: unknown key, perhaps parameters",
        ),
        ({"overrides": ["recipe.lrr=1"]}, "mine.yaml: htm: recipe.lrr=1: unknown key"),
        ({"overrides": ["seed=3"]}, "seed=3: a study must not set seed"),
        ({"rows": {"none": ["seed=7"]}}, "seed=7: a study must not set seed"),
        ({"overrides": ["+devices=2"]}, "a study must not set devices"),
    ],
)
def test_invalid_study_files_are_refused(values: Any, message: str, tmp_path: Path):
    with pytest.raises(UserError, match=message):
        plan(str(changed(tmp_path, **values)), Settings(outputs=str(tmp_path)))


def test_own_study_can_be_tested_against_a_row_of_the_paper(tmp_path: Path):
    rows = {"mine": {"overrides": ["model=cct_2_3x2"], "against": "table5/none"}}
    path = changed(tmp_path, rows=rows)
    settings = Settings(outputs=str(tmp_path))
    points = points_of(studies_of(str(path)), settings)
    keys = keys_of(points, settings)
    paper = {x.label: x.key for x in _points(settings)}
    assert keys["table5/none"] == paper["table5/none"] and set(keys) == {"mine/mine", "table5/none"}


def test_study_files_fix_scale_and_data_set(tmp_path: Path):
    with pytest.raises(UserError, match="scale=smoke: allowed is full"):
        plan(str(FIRST), Settings(scale="smoke", outputs=str(tmp_path)))
    with pytest.raises(UserError, match="fixes its data set"):
        plan(str(FIRST), Settings(dataset="digits", outputs=str(tmp_path)))


def test_digits_are_written_as_two_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["write_digits.py", str(tmp_path)])
    write_digits.main()
    numbers = {
        half: Counter(path.parent.name for path in tmp_path.glob(f"{half}/*/*.png"))
        for half in ("train", "test")
    }
    digits = load_digits()
    assert numbers["train"] == dict.fromkeys(map(str, range(10)), 10)
    assert numbers["test"].total() == len(digits.target) - 100 == 1697
    path = tmp_path / f"train/{digits.target[7]}/0007.png"  # of the first ten of its digit
    with Image.open(path) as image:
        assert np.array_equal(np.asarray(image), np.round(digits.images[7] * 255 / 16))


def test_openmixup_study_at_smoke_scale_trains_on_digits():
    runs = plan(str(RESULTS / "openmixup_cifar100.yaml"), Settings(scale="smoke", outputs="x"))
    assert len(runs) == 4 and {run.config.seed for run in runs} == {0}
    for run in runs:
        assert run.config.dataset.name == "digits"
        htm = run.config.augmentation.htm
        assert htm is None or (htm.tau, htm.rho) == (float("inf"), 0)
        assert run.config.recipe.clip_grad_norm == 5 and run.config.recipe.max_steps == 4


def test_find_runs_prefers_the_finished_folder_of_a_run(tmp_path: Path):
    config = dataclasses.replace(config_of(), output_root=str(tmp_path))
    for name in ("a", "b", "c"):
        RunFolder.of(dataclasses.replace(config, name=name)).create(config)
    RunFolder(tmp_path / "b").write_summary(status="finished", top1_last=1.0)
    assert find_runs(tmp_path)[run_hash(config)].path.name == "b"
    (tmp_path / "a" / "summary.json").write_text("{")
    assert find_runs(tmp_path)[run_hash(config)].path.name == "b"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text("a: [")
    assert len(find_runs(tmp_path)) == 1


@pytest.mark.parametrize(
    ("changes", "label", "root"),
    [
        ({}, "table1/cifar100_htm", "data"),
        ({"data": "/my data/it's"}, "table1/cifar10_htm", "/my data/it's"),
        ({"data": "/d"}, "table2/imagenet1k_htm", "/d/imagenet"),
        ({"data": "/d", "dataset": "imagenet1k"}, "table2/imagenet1k_htm", "/d"),
        ({"data": "/d", "dataset": "image_folder"}, "table1/cifar100_htm", "/d"),
        ({"dataset": "digits"}, "table1/cifar100_htm", None),
        ({"dataset": "digits", "scale": "smoke"}, "table1/cifar100_htm", None),
        ({"data": "/d", "scale": "smoke"}, "table1/cifar100_htm", "/d"),
        ({"scale": "smoke"}, "table1/cifar100_htm", None),
    ],
)
def test_settings_choose_the_folder_of_the_data(changes: Any, label: str, root: str | None):
    points = _points(Settings(**changes), label.partition("/")[0])
    (point,) = (x for x in points if x.label == label)
    assert point.config.dataset.root == root
    assert point.config.dataset.name == changes.get("dataset", point.config.dataset.name)


def test_scale_of_stacks_applies_to_their_parts():
    scale = module.Scale(about="", stacks={"htm": ["a"], "htm+vtm": ["b"], "vtm": ["c"]})
    assert scale.of_stack(["vtm", "htm"]) == ["a", "b", "c"] and scale.of_stack(["htm"]) == ["a"]


def test_planning_imports_neither_torch_nor_pandas():
    code = "import sys, reproduction.studies.options; print({'torch', 'pandas'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"


def test_points_of_equal_configurations_have_equal_keys():
    points = {point.label: point for point in _points(Settings())}
    seeded = dataclasses.replace(points["table4/full"].config, seed=3)
    assert run_hash(dataclasses.replace(seeded, seed=0)) == points["table1/cifar100_htm"].key
    assert parse(dataclasses.asdict(seeded), needs_data=False) == seeded
