"""The configuration composes, defaults come from where they should, and identity is stable."""

import itertools

import pytest
import yaml

from reproduction.cli import compose
from reproduction.config import CONF_DIR, Config
from reproduction.parse import parse
from reproduction.runs import default_name, run_hash

MODELS = sorted(path.stem for path in (CONF_DIR / "model").glob("*.yaml"))
EXPERIMENTS = sorted(
    str(path.relative_to(CONF_DIR / "experiment").with_suffix(""))
    for path in (CONF_DIR / "experiment").rglob("*.yaml")
)


def config_of(*overrides: str) -> Config:
    return parse(compose("train", list(overrides)).raw)


STACKS = [
    ",".join(stack)
    for size in range(5)
    for stack in itertools.combinations(("mixup", "cutmix", "htm", "vtm"), size)
]


@pytest.mark.parametrize("model", MODELS)
def test_every_model_takes_every_stack_without_further_overrides(model: str):
    for stack in STACKS:
        config = config_of(f"model={model}", f"augmentation=[{stack}]")
        assert config.augmentation.stack == [name for name in stack.split(",") if name]


@pytest.mark.parametrize(
    ("model", "layers"),
    [("cct_2_3x2", (1, 1)), ("cct_7_3x1", (2, 2)), ("vit_base_patch16_224", (3, 3))],
)
def test_layers_come_with_the_model(model: str, layers: tuple[int, int]):
    stack = config_of(f"model={model}", "augmentation=[htm,vtm]").augmentation
    assert stack.htm is not None and stack.vtm is not None
    assert (stack.htm.layer, stack.vtm.layer) == layers
    assert (stack.htm.tau, stack.htm.rho, stack.vtm.kappa) == (2.0, 0.005, 3)


def test_infinite_thresholds_are_legal():
    htm = config_of("augmentation.htm.tau=inf", "augmentation.htm.rho=inf").augmentation.htm
    assert htm is not None
    assert htm.tau == htm.rho == float("inf")


@pytest.mark.parametrize("group", ["model", "dataset", "augmentation", "recipe", "logger"])
def test_every_option_has_the_name_of_its_file(group: str):
    for path in (CONF_DIR / group).glob("*.yaml"):
        content = yaml.safe_load(path.read_text())
        if group == "augmentation":
            assert list(content) == [path.stem]
        elif group != "recipe":
            assert content["name"] == path.stem


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_its_head_gives_paper_value_and_command(experiment: str):
    overrides = [f"experiment={experiment}"]
    if "imagenet" in experiment:
        overrides.append("dataset=digits")  # the real one is not here
    composed = compose("train", overrides)
    assert composed.experiment == experiment
    parse(composed.raw)
    head = (CONF_DIR / "experiment" / f"{experiment}.yaml").read_text().split("defaults:")[0]
    assert f"python train.py experiment={experiment}" in head
    assert "paper" in head.lower()


def test_an_experiment_sets_the_seed_and_the_command_line_wins(tmp_path):
    assert config_of("seed=7").seed == 7
    assert config_of("recipe=cifar_cct").recipe.warmup_epochs == 10
    assert config_of("recipe=cifar_cct", "recipe.epochs=3").recipe.warmup_epochs == 0
    assert config_of("recipe=cifar_cct", "recipe.warmup_epochs=2").recipe.warmup_epochs == 2


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "output_root=elsewhere",
        "resume=auto",
        "device=cpu",
        "logger=wandb",
        "dataset.workers=3",
    ],
)
def test_what_changes_no_result_changes_no_identity(override: str):
    assert run_hash(config_of(override)) == run_hash(config_of())


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "devices=2",
        "recipe.lr=0.5",
        "dataset.limit=100",
        "augmentation.htm.tau=1.0",
        "augmentation=[htm]",
        "model.depth=3",
    ],
)
def test_what_changes_a_result_changes_the_identity(override: str):
    assert run_hash(config_of(override)) != run_hash(config_of())


def test_identity_does_not_depend_on_how_a_value_is_written():
    assert run_hash(config_of("recipe.lr=1")) == run_hash(config_of("recipe.lr=1.0"))
    swapped = config_of("augmentation=[vtm,htm]")
    assert run_hash(swapped) == run_hash(config_of("augmentation=[htm,vtm]"))


def test_default_name_tells_model_data_stack_and_seed():
    name = default_name(config_of("seed=3", "augmentation=[cutmix,mixup]"), None)
    assert name.startswith("cct_2_3x2-digits-mixup+cutmix-s3-")
    assert len(name.rpartition("-")[2]) == 8
    assert "-plain-s0-" in default_name(config_of("augmentation=[]"), None)
    assert default_name(config_of(), "table1/a").startswith("table1-a-s0-")
