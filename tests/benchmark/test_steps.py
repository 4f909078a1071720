"""The benchmark times the steps of the trainer itself."""

import pytest
import torch

from reproduction.studies.study import Settings
from reproduction.system.errors import UserError
from scripts.benchmark.latency import detector_configs
from scripts.benchmark.measure import ON_CPU, ON_GPU, TRAINED_AS, parse_sizes
from scripts.benchmark.parts import exponent, htm_parts
from scripts.benchmark.speed import step_of
from scripts.benchmark.steps import (
    VARIANTS,
    conditions,
    sharp_trainer,
    step_config,
    variant_configs,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("model", TRAINED_AS)
def test_variant_configs_differ_in_their_stacks(model: str):
    configs = variant_configs(model, "float32")
    for name, stack in VARIANTS.items():
        assert configs[name].augmentation.stack == stack
    wide = {name for name in configs if name not in VARIANTS}
    assert wide == ({"VTM, kappa 80"} if model == "cct_7_3x1" else set())
    assert configs["HTM"].augmentation.htm.tau == float("inf")


@pytest.mark.parametrize(
    ("model", "overrides", "expected"),
    [
        ("cct_2_3x2", [], "attn_drop 0.0, drop_path 0.1, drop 0.0, attention flash, adamw"),
        (
            "cct_2_3x2",
            ["model.attn_drop=0.1"],
            "drop_path 0.1, drop 0.0, attention composed, adamw",
        ),
        ("vit_base_patch16_224", [], "pos_drop_rate 0.0"),
    ],
)
def test_conditions_state_dropout_and_attention(model: str, overrides: list[str], expected: str):
    config = step_config(model, [], "bf16", *overrides)
    text = conditions(config, sharp_trainer(config, CPU).module.model, CPU)
    assert text.startswith("bf16, ") and expected in text


def test_step_of_trains_and_mixes_every_sample():
    plain = sharp_trainer(step_config("cct_2_3x2", [], "float32"), CPU)
    mixing = sharp_trainer(step_config("cct_2_3x2", ["htm"], "float32"), CPU, plain.module.model)
    before = plain.module.model.head.weight.clone()
    step_of(plain, 4)()
    between = plain.module.model.head.weight.clone()
    (part,) = step_of(mixing, 4)()
    stats = part.output.stats
    after = plain.module.model.head.weight
    assert not torch.equal(before, between) and not torch.equal(between, after)
    assert stats["mixed_samples"] == 4 and stats["mixed_tokens"] > 1
    assert (plain.step, mixing.step) == (1, 1)


def test_compiled_variants_leave_the_shared_model_uncompiled():
    configs = variant_configs("cct_2_3x2", "float32", compiled=True)
    assert {name for name, config in configs.items() if config.compile} == {
        "plain, compiled",
        "HTM and VTM, compiled",
    }
    shared = sharp_trainer(configs["plain"], CPU).module.model
    trainer = sharp_trainer(configs["plain, compiled"], CPU, shared)
    assert trainer.module.model is shared and trainer.module._compiled_call_impl is not None
    assert not any("forward" in vars(part) for part in shared.modules())


def test_step_of_writes_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    step_of(sharp_trainer(step_config("cct_2_3x2", ["vtm"], "float32"), CPU), 2)()
    assert not list(tmp_path.iterdir())


def test_htm_parts_run_one_by_one():
    config = detector_configs(Settings(scale="smoke"))["attention"]
    parts = htm_parts(config, 3, CPU, "float32")
    for work in parts.values():
        work()
    assert next(iter(parts)) == "all three" and len(parts) == 7


def test_exponent_fits_a_power_law():
    assert exponent([1, 2, 4], [3, 12, 48]) == 2
    assert exponent([32, 64, 1024], [5, 5, 5]) == 0


def test_parse_sizes_parses_model_and_batch():
    assert parse_sizes(["cct_7_3x1:128"]) == (("cct_7_3x1", 128),)
    assert {model for model, _ in (*ON_CPU.steps, *ON_GPU.steps)} == set(TRAINED_AS)


@pytest.mark.parametrize("size", ["resnet18:4", "cct_7_3x1", "cct_7_3x1:1", "cct_7_3x1:x"])
def test_parse_sizes_refuses_invalid_sizes(size: str):
    with pytest.raises(UserError, match=f"sizes={size}: "):
        parse_sizes([size])
