"""The benchmark times the steps of the trainer itself."""

import pytest
import torch

from reproduction.studies.study import Settings
from reproduction.system.errors import PlainError, UserError
from scripts.benchmark import steps
from scripts.benchmark.latency import detector_configs, htm_parts
from scripts.benchmark.measure import ON_CPU, ON_GPU, QUICK, parse_sizes
from scripts.benchmark.steps import (
    COMPILED,
    VARIANTS,
    check_against_eager,
    conditions,
    covered,
    variant_configs,
    variant_trainers,
)
from scripts.benchmark.trainers import TRAINED_AS, sharp_trainer, step_config, step_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("model", TRAINED_AS)
def test_variant_configs_differ_in_their_stacks(model: str):
    configs = variant_configs(model, "float32")
    for name, (stack, _) in VARIANTS.items():
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
    text = conditions(sharp_trainer(config, CPU))
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


def test_eager_variants_share_a_model_and_transmix_has_its_own():
    trainers = variant_trainers(variant_configs("cct_2_3x2", "float32"), CPU)
    first = trainers["plain"].module.model
    own = {name for name, trainer in trainers.items() if trainer.module.model is not first}
    assert own == {"CutMix", "TransMix"}
    assert {name for name, trainer in trainers.items() if trainer.attention_labels} == {"TransMix"}
    (part,) = step_of(trainers["TransMix"], 4)()
    (area,) = step_of(trainers["CutMix"], 4)()
    assert not torch.equal(part.output.targets, area.output.targets)


def test_compiled_variants_have_models_of_their_own_and_an_eager_baseline():
    configs = variant_configs("cct_2_3x2", "float32", "reduce-overhead")
    assert [*configs] == [*COMPILED, "plain, eager"]
    assert {configs[name].compile for name in COMPILED} == {"reduce-overhead"}
    assert configs["plain, eager"].compile is False
    trainers = variant_trainers(configs, CPU)
    assert len({id(trainer.module.model) for trainer in trainers.values()}) == len(trainers) - 1


def test_compiled_steps_that_differ_from_eager_ones_are_not_timed():
    """The compiled step is replaced by one of other weights; nothing is compiled."""
    trainer = sharp_trainer(step_config("cct_2_3x2", [], "float32", "compile=true"), CPU)
    changed = sharp_trainer(step_config("cct_2_3x2", [], "float32"), CPU)
    for parameter in changed.module.parameters():
        parameter.data.mul_(2)
    other = step_of(changed, 4)
    with pytest.raises(
        PlainError, match="cct_2_3x2, compile=True: losses differ from eager ones by"
    ):
        check_against_eager(trainer, other, 4)
    same = step_of(sharp_trainer(step_config("cct_2_3x2", [], "float32"), CPU), 4)
    assert check_against_eager(trainer, same, 4) == 0


def test_a_group_that_cannot_be_timed_says_why(monkeypatch: pytest.MonkeyPatch):
    def too_large(*args: object) -> None:
        raise PlainError("does not fit")

    monkeypatch.setattr(steps, "step_rows", too_large)
    (group,) = steps.measure_batches(QUICK, CPU)
    assert group["rows"] == {} and group["about"].endswith(", adamw; not timed: does not fit")


def test_covered_counts_overlaps_once():
    assert covered([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4


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


def test_parse_sizes_parses_model_and_batch():
    assert parse_sizes(["cct_7_3x1:128"]) == (("cct_7_3x1", 128),)
    assert {model for model, _ in (*ON_CPU.steps, *ON_GPU.steps)} == set(TRAINED_AS)


@pytest.mark.parametrize("size", ["resnet18:4", "cct_7_3x1", "cct_7_3x1:1", "cct_7_3x1:x"])
def test_parse_sizes_refuses_invalid_sizes(size: str):
    with pytest.raises(UserError, match=f"sizes={size}: "):
        parse_sizes([size])
