"""The runs that tables and sweeps need: numbers, identity, scales, folders."""

import math
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from reproduction.config import Config, ViT
from reproduction.data.folders import missing_data
from reproduction.data.sources import load_source
from reproduction.data.stand_ins import make_stand_ins
from reproduction.reporting.cells import SCALES, read_cells
from reproduction.runs.folder import RunFolder, find_runs, run_hash
from reproduction.studies.plan import PlannedRun, Settings, cells_of, plan, point_configs
from reproduction.system.errors import UserError
from tests.reproduction.conftest import config_of, write_images

COUNTS = {"table1": 8, "table2": 4, "table3": 3, "table4": 5, "table5": 9}
FIGURES = {"figure3": 1, "figure4": 1}
SWEEPS = {"sweep-tau": 8, "sweep-rho": 7, "sweep-kappa": 9}
CELLS = {cell.experiment: cell for cell in read_cells()}


def settings(tmp_path: Path, **changes: str) -> Settings:
    return Settings(**{"outputs": str(tmp_path / "out"), **changes})


def labelled(runs: list[PlannedRun], label: str) -> PlannedRun:
    (run,) = (run for run in runs if label in run.labels)
    return run


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[PlannedRun]]:
    """Maps each scale to all runs of all studies; composing them takes seconds."""
    root = tmp_path_factory.mktemp("plans") / "out"
    return {scale: plan("all", Settings(scale=scale, outputs=str(root)), 1) for scale in SCALES}


@pytest.mark.parametrize(
    ("scale", "cells", "runs_of_cells", "taus", "kappas"),
    [
        ("full", 29, 22, 8 - 2, 9),  # two values of the sweep are cells: 2, and inf (no ScoreNet)
        ("short", 29, 22, 8 - 2, 9),
        ("smoke", 29, 21, 8 - 1, 9),  # always mixes every sample
        ("digits", 21, 14, 8 - 2, 7),
    ],
)
def test_plan_shares_runs_of_one_configuration(all_runs, scale, cells, runs_of_cells, taus, kappas):
    runs = all_runs[scale]
    of_cells = [run for run in runs if any(label in CELLS for label in run.labels)]
    assert sum(label in CELLS for run in runs for label in run.labels) == cells
    assert len(of_cells) == runs_of_cells
    assert len(runs) == runs_of_cells + taus + (7 - 1) + (kappas - 1)  # one value of each is a cell
    assert len({run.name for run in runs}) == len({run_hash(r.config) for r in runs}) == len(runs)


def test_plan_has_the_expected_number_of_runs_per_study_and_seed(tmp_path: Path, all_runs):
    outputs = all_runs["full"][0].config.output_root
    for study, number in {**COUNTS, **FIGURES, **SWEEPS}.items():
        runs = plan(study, Settings(outputs=outputs), 3)
        assert len(runs) == 3 * number, study
        assert [run.config.seed for run in runs] == [0] * number + [1] * number + [2] * number


def test_plan_names_runs_after_their_first_cell_in_every_study(all_runs):
    outputs = all_runs["full"][0].config.output_root
    in_table4 = labelled(plan("table4", Settings(outputs=outputs), 1), "table4/full")
    in_sweep = labelled(plan("sweep-tau", Settings(outputs=outputs), 1), "tau=2")
    first = labelled(all_runs["full"], "table1/cifar100_htm")
    assert in_table4.name == in_sweep.name == first.name
    assert first.name.startswith("table1-cifar100_htm-s0-")


@pytest.mark.parametrize("figure", FIGURES)
def test_figures_use_a_run_of_the_tables(all_runs, figure):
    outputs = all_runs["full"][0].config.output_root
    (run,) = plan(figure, Settings(outputs=outputs), 1)
    assert run.labels == ("table1/cifar100_htm",)
    assert run.name == labelled(all_runs["full"], "table1/cifar100_htm").name


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("label", ["table1/cifar100_htm_vtm", "tau=inf", "kappa=10"])
def test_overrides_of_a_run_compose_to_its_config(all_runs, scale, label):
    run = labelled(all_runs[scale], label)
    composed = config_of(*run.overrides, needs_data=False)
    assert composed == run.config


def test_short_scale_only_shortens_training_to_a_tenth(all_runs):
    for full, short in zip(all_runs["full"], all_runs["short"], strict=True):
        assert full.labels == short.labels
        epochs = full.config.recipe.epochs // 10
        warmup = epochs * full.config.recipe.warmup_epochs // full.config.recipe.epochs
        recipe = replace(
            full.config.recipe, epochs=epochs, warmup_epochs=warmup, cooldown_epochs=warmup
        )
        shortened = replace(full.config, recipe=recipe)
        assert run_hash(shortened) == run_hash(short.config)


def by_label(runs: list[PlannedRun]) -> dict[str, Config]:
    return {label: run.config for run in runs for label in run.labels}


def test_smoke_scale_keeps_models_and_stacks_and_mixes_every_sample(all_runs):
    fulls = by_label(all_runs["full"])
    for label, smoke in by_label(all_runs["smoke"]).items():
        full = fulls[label]
        htm = smoke.augmentation.htm
        if htm is not None and full.augmentation.htm is not None:
            tau = float(label[4:]) if label.startswith("tau=") else math.inf
            rho = float(label[4:]) if label.startswith("rho=") else 0.0
            assert (htm.tau, htm.rho) == (tau, rho)
            htm = replace(htm, tau=full.augmentation.htm.tau, rho=full.augmentation.htm.rho)
        assert replace(smoke.augmentation, htm=htm) == full.augmentation
        model = smoke.model
        if isinstance(model, ViT):
            assert model.pretrained is None and model.image_size == 32
            assert (model.depth, model.architecture) == (12, "vit_base_patch16_224")
        else:
            assert model == full.model


def test_digits_scale_only_adapts_to_the_small_model(all_runs):
    fulls = by_label(all_runs["full"])
    configs = by_label(all_runs["digits"])
    assert {label for label in configs if label in CELLS} == {
        cell.experiment for cell in CELLS.values() if cell.column == "CIFAR-100"
    }
    recipe = config_of("recipe.epochs=24").recipe  # the quickstart's
    for label, config in configs.items():
        assert (config.model.name, config.dataset.name) == ("cct_2_3x2", "digits")
        assert config.dataset.limit == 150 and config.recipe == recipe
        if "=" not in label or label.startswith(("tau", "rho")):
            expected = full_stack = fulls[label].augmentation
            if full_stack.htm is not None:
                expected = replace(expected, htm=replace(full_stack.htm, layer=1))
            if full_stack.vtm is not None:
                kappa = 20 if full_stack.vtm.kappa == 80 else 3  # of 64 tokens, not of 256
                expected = replace(expected, vtm=replace(full_stack.vtm, layer=1, kappa=kappa))
            if full_stack.manifold_mixup is not None:
                manifold = replace(full_stack.manifold_mixup, layers=[0, 1])
                expected = replace(expected, manifold_mixup=manifold)
            assert config.augmentation == expected


def test_plan_refuses_studies_without_cells_at_the_scale(tmp_path: Path):
    with pytest.raises(UserError, match="study=table2: has no cells at digits scale"):
        plan("table2", settings(tmp_path, scale="digits"), 1)
    assert {cell.table for cell in cells_of("digits")} == {1, 3, 4, 5}


def test_scales_have_separate_folders(all_runs):
    roots = {scale: Path(runs[0].config.output_root) for scale, runs in all_runs.items()}
    assert roots["short"] == roots["full"] / "short"
    assert roots["smoke"] == roots["full"] / "smoke"
    assert roots["digits"] == roots["full"] / "digits"
    for run in all_runs["smoke"]:
        assert Path(str(run.config.dataset.root)).is_relative_to(roots["smoke"] / "data")


@pytest.mark.parametrize(("scale", "tokens"), [("full", 256), ("smoke", 256), ("digits", 64)])
def test_sweep_kappa_goes_up_to_all_tokens(all_runs, scale, tokens):
    config = labelled(all_runs[scale], f"kappa={tokens}").config
    assert config.model.tokens == tokens
    assert config.augmentation.vtm is not None and config.augmentation.vtm.kappa == tokens


def test_plan_recognises_runs_of_train_py_by_their_config(tmp_path: Path):
    chosen = settings(tmp_path)
    overrides = ["experiment=table3/attention", "seed=1", "name=mine"]
    config = config_of(*overrides, f"output_root={chosen.root}")
    RunFolder.of(config).create(config)
    runs = plan("table1", chosen, 2)
    assert [run.name for run in runs if run.name == "mine"] == ["mine"]
    assert labelled([r for r in runs if r.config.seed == 1], "table1/cifar100_htm").name == "mine"
    cell = point_configs("table4", chosen)["table4/full"]
    assert find_runs(chosen.root)[run_hash(replace(cell, seed=1))].path.name == "mine"


def test_find_runs_prefers_the_finished_folder_of_a_run(tmp_path: Path):
    chosen = settings(tmp_path)
    config = point_configs("table1", chosen)["table1/cifar100_htm"]
    for name in ("a", "b", "c"):
        RunFolder.of(replace(config, name=name)).create(config)
    RunFolder(chosen.root / "b").write_summary(status="finished", top1_last=1.0)
    assert find_runs(chosen.root)[run_hash(config)].path.name == "b"
    (chosen.root / "a" / "summary.json").write_text("{")
    assert find_runs(chosen.root)[run_hash(config)].path.name == "b"


def test_find_runs_ignores_other_folders(tmp_path: Path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text("a: [")
    (tmp_path / "another").mkdir()
    assert find_runs(tmp_path) == {}


@pytest.mark.parametrize(
    ("changes", "experiment", "root"),
    [
        ({}, "table1/cifar100_htm", "data"),
        ({"data": "/my data/it's"}, "table1/cifar10_htm", "/my data/it's"),
        ({"data": "/d"}, "table2/imagenet1k_htm", "/d/imagenet"),
        ({"data": "/d", "dataset": "imagenet1k"}, "table2/imagenet1k_htm", "/d"),
        ({"data": "/d", "dataset": "image_folder"}, "table1/cifar100_htm", "/d"),
        ({"dataset": "digits"}, "table1/cifar100_htm", None),
        ({"dataset": "digits", "scale": "smoke"}, "table1/cifar100_htm", None),
        ({"data": "/d", "scale": "smoke"}, "table1/cifar100_htm", "/d"),
        ({"scale": "smoke"}, "table1/cifar100_htm", "outputs/smoke/data/cifar100"),
    ],
)
def test_settings_replace_data_set_and_folder(changes, experiment, root):
    config = point_configs(experiment.partition("/")[0], Settings(**changes))[experiment]
    assert config.dataset.root == root
    assert config.dataset.name == changes.get("dataset", config.dataset.name)


def test_inconsistent_settings_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="scale=huge"):
        Settings(scale="huge")
    with pytest.raises(UserError, match="image_folder"):
        Settings(dataset="image_folder")
    for changes in ({"dataset": "cifar100"}, {"data": "/d"}):
        with pytest.raises(UserError, match="scale=digits: always uses digits"):
            Settings(scale="digits", **changes)
    with pytest.raises(UserError, match="study=table6"):
        plan("table6", settings(tmp_path, scale="smoke"), 1)
    with pytest.raises(UserError, match="devices=3"):
        point_configs("table1", Settings(devices=3))


def test_plan_does_not_import_torch():
    code = "import sys, scripts.reproduce; print('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False"]


@pytest.mark.parametrize(
    ("name", "classes", "train", "held_out"),
    [
        ("cifar10", 10, 100, 50),
        ("cifar100", 100, 200, 100),
        ("imagenet1k", 1000, 1000, 1000),
        ("image_folder", 10, 80, 40),
    ],
)
def test_stand_ins_are_read_by_the_loaders_of_their_data_sets(
    tmp_path, name, classes, train, held_out
):
    make_stand_ins(name, tmp_path / "here" / name)
    make_stand_ins(name, tmp_path / "there" / name)
    source = load_source(name, str(tmp_path / "here" / name), None)
    again = load_source(name, str(tmp_path / "there" / name), None)
    assert (len(source.train), len(source.held_out)) == (train, held_out)
    assert len(source.classes) == len(set(source.train.targets)) == classes
    image, target = source.train[3]
    assert image.size == (32, 32) and image.mode == "RGB"
    assert image.tobytes() == again.train[3][0].tobytes() and target == again.train[3][1]
    assert image.tobytes() != source.train[4][0].tobytes()
    assert [path.name for path in (tmp_path / "here").iterdir()] == [name]


def test_older_stand_ins_are_made_anew_with_the_synsets_of_imagenet(tmp_path: Path):
    root = write_images(tmp_path / "imagenet1k", ["n00000000", "n00000001"], train=1, held_out=1)
    assert "'n00000000' is none of them" in str(missing_data("imagenet1k", str(root)))
    make_stand_ins("imagenet1k", root)
    assert missing_data("imagenet1k", str(root)) is None
    shutil.rmtree(root / "val" / "n15075141")
    assert "'n15075141' is only in" in str(missing_data("imagenet1k", str(root)))
    shutil.rmtree(root / "train" / "n15075141")
    assert "'n15075141' is missing" in str(missing_data("imagenet1k", str(root)))


def test_numbered_folders_are_not_imagenet(tmp_path: Path):
    """Their alphabetical order would give folder 2 the class 112."""
    for split, number in product(("train", "val"), range(1000)):
        (tmp_path / split / str(number)).mkdir(parents=True)
    assert "'0' is none of them" in str(missing_data("imagenet1k", str(tmp_path)))
