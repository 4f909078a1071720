"""Composition, defaults, experiments and the identity (hash) of configurations."""

import itertools
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from reproduction.config import CONF_DIR
from reproduction.runs.compose import LISTS, compose, isolated_hydra, read_overrides
from reproduction.runs.identity import default_name, run_hash
from reproduction.runs.parse import parse
from reproduction.start import command as cli
from reproduction.studies.study import TABLES, papers_studies
from reproduction.system.errors import UserError
from tests.reproduction.conftest import config_of
from tokenmixup import HTM, VTM, ManifoldMixup

TRANSFORMERS = sorted(
    path.stem
    for path in (CONF_DIR / "model").glob("*.yaml")
    if yaml.safe_load(path.read_text())["family"] != "library"
)
EXPERIMENTS = sorted(
    str(path.relative_to(CONF_DIR / "experiment").with_suffix(""))
    for path in (CONF_DIR / "experiment").rglob("*.yaml")
)


STACKS = [
    ",".join(stack)
    for size in range(5)  # from none to all
    for stack in itertools.combinations(("mixup", "cutmix", "htm", "vtm"), size)
]


@pytest.mark.parametrize("model", TRANSFORMERS)
def test_every_transformer_composes_with_every_stack(model: str):
    for stack in STACKS if model == "cct_2_3x2" else (STACKS[0], STACKS[-1]):
        config = config_of(f"model={model}", f"augmentation=[{stack}]")
        assert config.augmentation.stack == [name for name in stack.split(",") if name]


@pytest.mark.parametrize(
    ("model", "layers"),
    [("cct_2_3x2", (1, 1)), ("cct_7_3x1", (2, 2)), ("vit_base_patch16_224", (3, 3))],
)
def test_default_layers_depend_on_the_model(model: str, layers: tuple[int, int]):
    stack = config_of(f"model={model}", "augmentation=[htm,vtm]").augmentation
    assert stack.htm is not None and stack.vtm is not None
    assert (stack.htm.layer, stack.vtm.layer) == layers
    assert (stack.htm.tau, stack.htm.rho, stack.vtm.kappa) == ("auto", "auto", 3)


def test_infinite_thresholds_are_valid():
    htm = config_of("augmentation.htm.tau=inf", "augmentation.htm.rho=inf").augmentation.htm
    assert htm is not None
    assert htm.tau == htm.rho == float("inf")


@pytest.mark.parametrize("group", ["model", "dataset", "augmentation", "recipe", "logger"])
def test_options_are_named_like_their_files(group: str):
    for path in (CONF_DIR / group).glob("*.yaml"):
        content = yaml.safe_load(path.read_text())
        if group in LISTS:
            assert list(content) == [path.stem] or path.stem == "none"
        elif group != "recipe":
            assert content["name"] == path.stem


@pytest.mark.parametrize("kind", [HTM, VTM, ManifoldMixup])
def test_augmentation_files_list_all_library_options(kind: Any):
    path = CONF_DIR / "augmentation" / f"{kind.key}.yaml"
    content = yaml.safe_load(path.read_text())
    hint = f"{path.name} needs a line for each field of {kind.__name__}, in the same order"
    assert list(content[kind.key]) == [option.name for option in fields(kind)], hint


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiments_compose_and_state_paper_value_and_command(experiment: str):
    overrides = [f"experiment={experiment}"]
    if "imagenet" in experiment:
        overrides.append("dataset=digits")  # ImageNet is not available
    composed = compose("train", overrides)
    assert composed.experiment == experiment
    parse(composed.raw)
    head = (CONF_DIR / "experiment" / f"{experiment}.yaml").read_text().split("defaults:")[0]
    assert f"python train.py experiment={experiment}" in head
    assert "paper" in head.lower()


def test_warmup_scales_with_epochs():
    assert config_of("recipe=cifar_cct").recipe.warmup_epochs == 10
    assert config_of("recipe=cifar_cct", "recipe.epochs=3").recipe.warmup_epochs == 0
    assert config_of("recipe=cifar_cct", "recipe.warmup_epochs=2").recipe.warmup_epochs == 2


def test_overrides_take_precedence_over_experiments():
    htm = config_of("experiment=table1/cifar100_htm", "augmentation.htm.tau=9").augmentation.htm
    assert htm is not None and htm.tau == 9.0


@pytest.mark.parametrize(
    "experiment", [e for e in EXPERIMENTS if e.startswith(("table1", "table2"))]
)
def test_experiment_names_state_their_stacks(experiment: str):
    """test_recipes.py compares their values with docs/recipes.yaml."""
    dataset, _, parts = experiment.partition("/")[2].partition("_")
    stack = [part for part in parts.split("_") if part != "baseline"]
    if dataset != "imagenet1k":
        stack = ["mixup", "cutmix", *stack]
    raw = compose("train", [f"experiment={experiment}"]).raw
    assert parse(raw, needs_data=False).augmentation.stack == stack


def test_rows_of_the_paper_have_experiments_that_state_the_printed_values():
    tables = [papers_studies()[name] for name in TABLES]
    rows = [row for study in tables for row in study.rows.values()]
    assert len(rows) == 29
    assert {row.experiment for row in rows} == {e for e in EXPERIMENTS if e.startswith("table")}
    for row in rows:
        head = (CONF_DIR / "experiment" / f"{row.experiment}.yaml").read_text()
        assert all(f"{x:.2f}".rstrip("0") in head for x in row.printed.values()), row


def test_identity_ignores_options_that_do_not_change_results():
    """test_identity.py compares the losses of others."""
    for override in (
        *("name=other", "output_root=elsewhere", "resume=auto", "device=cpu", "compile=true"),
        *("logger=wandb", "checkpoint.every_minutes=3", "augmentation.htm.layer=[1]"),
    ):
        assert run_hash(config_of(override)) == run_hash(config_of()), override


def test_identity_depends_on_options_that_change_results():
    for override in (
        *("devices=2", "recipe.lr=0.5", "recipe.ema_decay=0.9", "dataset.limit=100"),
        *("augmentation=[htm]", "augmentation.htm.tau=1.0", "augmentation.htm.layer=[0,1]"),
        "augmentation.vtm.stop_gradient=true",
    ):
        assert run_hash(config_of(override)) != run_hash(config_of()), override


def test_identity_does_not_depend_on_notation():
    assert run_hash(config_of("recipe.lr=1")) == run_hash(config_of("recipe.lr=1.0"))
    integer, decimal = (config_of(f"augmentation.htm.tau={tau}") for tau in ("1", "1.0"))
    assert run_hash(integer) == run_hash(decimal) != run_hash(config_of())
    swapped = config_of("augmentation=[vtm,htm]")
    assert run_hash(swapped) == run_hash(config_of("augmentation=[htm,vtm]"))


def test_identity_depends_on_the_root_only_of_image_folders(tmp_path: Path):
    for place, split, name in itertools.product((".", "moved"), ("train", "val"), "ab"):
        (tmp_path / place / split / name).mkdir(parents=True)
    for name, is_same in (("cifar10", True), ("image_folder", False)):
        before, after = (
            run_hash(config_of(f"dataset={name}", f"dataset.root={root}"))
            for root in (tmp_path, tmp_path / "moved")
        )
        assert (before == after) == is_same


def test_sweeps_may_glob_options():
    points = cli._points("train", cli._parse_arguments(["-m", "model=glob(cct*)", "seed=0,1"]))
    assert points is not None
    assert [point[0] for point in points] == ["model=cct_2_3x2"] * 2 + ["model=cct_7_3x1"] * 2


def test_names_of_runs_need_no_quotes():
    runs = ["outputs/a-tau=1-s0", "outputs/b-layer=0+1-s0"]
    points = cli._points("eval", cli._parse_arguments(["-m", f"run={','.join(runs)}"]))
    assert points is not None
    assert [compose("eval", point).raw["run"] for point in points] == runs


def test_default_name_states_model_data_stack_and_seed():
    name = default_name(config_of("seed=3", "augmentation=[cutmix,mixup]"), None)
    assert name.startswith("cct_2_3x2-digits-mixup+cutmix-s3-")
    assert len(name.rpartition("-")[2]) == 8
    assert "-plain-s0-" in default_name(config_of("augmentation=[]"), None)
    assert default_name(config_of(), "table1/a").startswith("table1-a-s0-")


@pytest.mark.parametrize(
    "name", ["x#1", "2024_11_26", "Geräte (1)", "a=b", "~x", "a & b", "photos/of:you", "1e5"]
)
def test_paths_need_no_quotes_for_hydra(name: str):
    overrides = cli._parse_arguments(
        [f"dataset.root={name}", f"name={name.replace('/', '')}"]
    ).overrides
    raw = compose("train", ["dataset=image_folder", *overrides]).raw
    assert (raw["dataset"]["root"], raw["name"]) == (name, name.replace("/", ""))


@pytest.mark.parametrize("value", ["a#1", "it's", 'a "b', "(1)", "\\'"])
def test_the_hint_for_special_characters_works_as_it_is_printed(value: str):
    with isolated_hydra():
        with pytest.raises(UserError) as refused:
            read_overrides("train", [f"dataset.options.x={value}"])
        hint = str(refused.value).partition("as a text: ")[2]
        shell = ["bash", "-c", f"printf %s {hint}"]
        typed = subprocess.run(shell, check=True, capture_output=True, text=True).stdout
        (override,) = read_overrides("train", [typed])
    assert override.value() == value


@pytest.mark.parametrize(
    ("cores", "devices", "workers"), [(64, 1, 16), (12, 2, 6), (2, 4, 1), (3, 1, 3)]
)
def test_default_workers_equal_cores_per_rank(monkeypatch, cores: int, devices: int, workers: int):
    monkeypatch.setattr("reproduction.runs.compose.usable_cores", lambda: cores)
    config = config_of("dataset=cifar10", f"devices={devices}", "recipe.batch_size=8")
    assert config.dataset.workers == workers
    assert config_of("dataset=cifar10", "dataset.workers=5").dataset.workers == 5
