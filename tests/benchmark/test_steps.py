"""The benchmark times the steps of the trainer itself."""

from itertools import islice

import pytest
import torch

from reproduction.system.errors import PlainError
from scripts.benchmark import steps
from scripts.benchmark.steps import (
    VARIANTS,
    check_against_eager,
    conditions,
    measure_steps,
    trainers_of,
)
from scripts.benchmark.trainers import TRAINED_AS, sharp_trainer, step_config, step_of

CPU = torch.device("cpu")
TINY = "cct_2_3x2"


def test_conditions_state_precision_dropout_and_optimiser():
    config = step_config(TINY, [], "bf16", "model.attn_drop=0.1")
    text = conditions(sharp_trainer(config, CPU))
    assert text == "bf16, attn_drop 0.1, drop_path 0.1, drop 0.0, adamw"


def test_step_of_trains_and_mixes_every_sample():
    plain = sharp_trainer(step_config(TINY, [], "float32"), CPU)
    mixing = sharp_trainer(step_config(TINY, ["htm"], "float32"), CPU, plain.module.model)
    before = plain.module.model.head.weight.clone()
    step_of(plain, 4)()
    between = plain.module.model.head.weight.clone()
    (part,) = step_of(mixing, 4)()
    stats = part.output.stats
    after = plain.module.model.head.weight
    assert not torch.equal(before, between) and not torch.equal(between, after)
    assert stats["mixed_samples"] == 4 and stats["mixed_tokens"] > 1
    assert (plain.step, mixing.step) == (1, 1)


def test_step_of_writes_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    step_of(sharp_trainer(step_config(TINY, ["vtm"], "float32"), CPU), 2)()
    assert not list(tmp_path.iterdir())


def test_eager_variants_share_a_model_and_compiled_ones_have_their_own():
    trainers = dict(trainers_of(TINY, CPU, ("false", "cuda-graph")))
    assert [*trainers][:5] == [*VARIANTS, "plain, compile=cuda-graph"]
    for name, trainer in trainers.items():
        variant, _, how = name.partition(", compile=")
        assert trainer.config.compile == (how or False)
        assert trainer.config.augmentation.stack == VARIANTS[variant]
    assert trainers["HTM"].config.augmentation.htm.tau == float("inf")
    models = [id(trainer.module.model) for trainer in trainers.values()]
    assert len({*models[:4]}) == 1 and len({*models}) == 5
    assert {"HTM", "plain"} <= {*VARIANTS} and TINY in TRAINED_AS


def test_compiled_steps_that_differ_from_eager_ones_are_not_timed():
    """The compiled step is replaced by one of other weights; nothing is compiled."""
    trainer = sharp_trainer(step_config(TINY, [], "float32", "compile=true"), CPU)
    changed = sharp_trainer(step_config(TINY, [], "float32"), CPU)
    for parameter in changed.module.parameters():
        parameter.data.mul_(2)
    other = step_of(changed, 4)
    with pytest.raises(
        PlainError, match="cct_2_3x2, compile=True: losses differ from eager ones by"
    ):
        check_against_eager(trainer, other, 4)
    same = step_of(sharp_trainer(step_config(TINY, [], "float32"), CPU), 4)
    assert check_against_eager(trainer, same, 4) == 0


def test_a_variant_that_cannot_be_timed_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
):
    def fails(trainer: object, *args: object) -> None:
        if trainer.config.augmentation.stack == ["vtm"]:  # type: ignore[attr-defined]
            raise RuntimeError("does not fit\nmore")

    monkeypatch.setattr(steps, "check_against_eager", fails)
    first, second = islice(measure_steps(TINY, 2, CPU, ["false"]), 2)
    assert [*second["rows"]] == ["plain", "plain, again", "HTM", "HTM and VTM"]
    assert second["left_out"] == {"VTM": "RuntimeError: does not fit"}
    assert first["title"] == "training step: cct_2_3x2, batch of 2"
    assert first["about"].endswith(", adamw")
