"""The training step: micro-batches, clipping, the scaler, the schedule, the average."""

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.conftest import slow
from tests.images import OWN, SOURCE
from tests.programs import (
    SHORT,
    SMALL_VIT,
    Run,
    assert_succeeded,
    build_trainer,
    evaluate,
    overrides_of,
    step,
    trained,
)

PLAIN = overrides_of("""
    model.attn_drop=0 model.drop_path=0 recipe.label_smoothing=0 model.embed_dim=16
    recipe.warmup_epochs=0 device=cpu
""")
SGD = (  # Adam's steps take the sign of noise
    PLAIN,
    overrides_of("recipe.optimizer=sgd recipe.lr=0.1 recipe.weight_decay=0"),
    "recipe.clip_grad_norm=null",
)
MIX_ALL = overrides_of("augmentation=[htm] augmentation.htm.tau=inf augmentation.htm.rho=0")
RESNET = overrides_of("model=timm model.architecture=resnet10t augmentation=[] device=cpu")
AVERAGED = (
    OWN,
    SHORT,
    overrides_of("recipe.lr=0.01 +dataset.options.train=57 recipe.warmup_epochs=0"),
    "recipe.drop_last=false",
)


def images_of(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return images, torch.arange(count) % 10


def parameters(trainer: Any) -> dict[str, Tensor]:
    named = trainer.module.named_parameters()
    return {name: parameter.detach().clone() for name, parameter in named}


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("stack", ["", "vtm"])
def test_updates_in_micro_batches_equal_full_batches(stack: str, count: int):
    """7 images, so that sizes differ."""
    overrides = (SGD, f"augmentation=[{stack}]")
    full = step(overrides, images_of(7))
    cut = step((overrides, f"recipe.grad_accum_steps={count}"), images_of(7))
    sizes = [part["loss"].divisor for part in cut.parts]
    assert len(sizes) == count
    assert sum(sizes) == 7
    assert max(sizes) - min(sizes) <= 1
    mean = np.average(cut.losses, weights=sizes)
    assert mean == pytest.approx(full.losses[0], abs=1e-5)
    assert_close(cut.gradients, full.gradients, atol=1e-5, rtol=1e-4)
    assert_close(parameters(cut.trainer), parameters(full.trainer), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("count", "replaces"), [(1, True), (2, True), (6, False)])
def test_pairs_are_matched_within_a_micro_batch(count: int, replaces: bool):
    """Of 6 images; one that is alone has no donor."""
    done = step((PLAIN, MIX_ALL, f"recipe.grad_accum_steps={count}"), images_of(6))
    assert sum(int(part["easy_samples"].total) for part in done.parts) == 6
    for part in done.parts:
        assert (part["mixed_tokens"].total > 0) == replaces


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_step_of_sgd_is_the_clipped_gradient(precision: str):
    """Of ScoreNet as well."""
    overrides = (SGD, MIX_ALL, "augmentation.htm.score_loss_weight=1", "recipe.clip_grad_norm=0.01")
    trainer = build_trainer((overrides, f"recipe.precision={precision}"))
    before = parameters(trainer)
    done = step(trainer, images_of(6))
    norm = torch.nn.utils.get_total_norm(list(done.gradients.values()))
    assert float(norm) == pytest.approx(0.01, rel=0.02)
    assert done.lr == 0.1
    expected = {name: value - 0.1 * done.gradients[name] for name, value in before.items()}
    assert_close(parameters(trainer), expected, atol=1e-6, rtol=1e-5)


RESNET_16 = slow(RESNET, id="resnet")  # its float16 on a CPU


@pytest.mark.parametrize("model", [pytest.param(PLAIN, id="cct"), RESNET_16])
def test_the_scaler_skips_an_update_that_is_not_finite(model: tuple[str, ...]):
    """The loss is finite, the scaled gradient is not; no parameter changes."""
    overrides = (model, "augmentation=[]", "recipe.precision=float16", "recipe.ema_decay=0.5")
    trainer = build_trainer(overrides)
    weight = list(trainer.module.parameters())[-2]
    with torch.no_grad():
        weight.mul_(1e4)
    before = deepcopy(trainer.state())
    old = parameters(trainer)
    done = step(trainer, images_of(6))
    assert math.isfinite(done.losses[0])
    assert not done.parts[0]["gradient_norm"].total.isfinite()
    assert_close(parameters(trainer), old, atol=0, rtol=0)
    with torch.no_grad():
        weight.mul_(1e-4)
    for _ in range(12):  # the scale halves until the gradient is finite
        done = step(trainer, images_of(6))
    assert done.gradients
    for gradient in done.gradients.values():
        assert gradient.isfinite().all()
    resumed = build_trainer(overrides)
    resumed.restore("", deepcopy(trainer.state()))
    assert resumed.state()["scaler"] == trainer.state()["scaler"] != before["scaler"]


def expected_rate(time: float) -> float:
    """Two epochs up, the cosine to the end of the fifth, the last rate in the sixth."""
    if time < 2:
        return 1e-5 + (0.01 - 1e-5) * time / 2
    part = min(time, 5) / 5
    height = (1 + math.cos(math.pi * part)) / 2
    return 1e-4 + (0.01 - 1e-4) * height


SCHEDULE = overrides_of("""
    recipe.epochs=6 recipe.batch_size=10 +dataset.options.train=35 recipe.lr=0.01
    recipe.min_lr=0.0001 recipe.warmup_lr=0.00001 recipe.warmup_epochs=2 recipe.cooldown_epochs=1
""")
BY_BATCH = [number / 3 for number in range(18)]
BY_EPOCH = [number // 3 for number in range(18)]


@pytest.mark.parametrize(("by", "times"), [("batch", BY_BATCH), ("epoch", BY_EPOCH)])
def test_learning_rates_are_warmed_up_follow_the_cosine_and_cool_down(
    here: Path, by: str, times: list[float]
):
    run = trained(OWN, SHORT, SCHEDULE, f"recipe.schedule_step={by}")
    rates = [line["lr"] for line in run.steps]
    expected = [expected_rate(time) for time in times]
    assert rates == pytest.approx(expected, rel=1e-6)


def test_vectors_and_embeddings_do_not_decay():
    overrides = ("model=vit_tiny_patch16_224", SMALL_VIT, "augmentation=[htm]", "device=cpu")
    trainer = build_trainer(overrides, "augmentation.htm.layer=1", "recipe.weight_decay=0.3")
    decay = {}
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            decay[id(parameter)] = group["weight_decay"]
    exempt = ("model.pos_embed", "model.cls_token", "model.reg_token")
    for name, parameter in trainer.module.named_parameters():
        expected = 0.3
        if parameter.ndim == 1 or name in exempt:
            expected = 0.0
        assert decay[id(parameter)] == expected, name


@pytest.mark.parametrize("name", ["adamw", "sgd", "timm.optim:Lamb"])
def test_an_optimizer_is_made_with_the_rates_of_the_recipe(name: str):
    rates = ("recipe.lr=0.02", "recipe.weight_decay=0.3")
    trainer = build_trainer(f"recipe.optimizer={name}", rates, PLAIN, "device=cpu")
    defaults = trainer.optimizer.defaults
    assert (defaults["lr"], defaults["weight_decay"]) == (0.02, 0.3)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with an average."""
    root = tmp_path_factory.mktemp("averaged")
    return trained(AVERAGED, "recipe.ema_decay=0.8", root=root)


@pytest.mark.parametrize("model", [PLAIN, RESNET], ids=["cct", "resnet"])
def test_the_average_follows_every_update(model: tuple[str, ...]):
    """Of weights, and of the statistics of batch norm."""
    trainer = build_trainer(model, "recipe.ema_decay=0.8")
    for _ in range(3):
        before = deepcopy(trainer.state()["model_ema"])
        step(trainer, images_of(6))
        now = trainer.state()
        for name, value in now["model_ema"].items():
            new = now["module"][f"model.{name}"]
            if value.is_floating_point():  # and no count of batches
                expected = 0.8 * before[name] + 0.2 * new
                assert_close(value, expected, atol=1e-7, rtol=1e-5)
            if model is PLAIN:  # of which all learn
                assert not torch.equal(value, new)


def test_the_average_is_evaluated(averaged: Run):
    best = max(averaged.epochs, key=lambda line: line["top1"])
    for weights, line in (("last", averaged.epochs[-1]), ("best", best)):
        overrides = (f"run={averaged.path}", f"weights={weights}", SOURCE, "device=cpu")
        assert_succeeded(evaluate(overrides))
        assert averaged.evaluation(weights)["eval_loss"] == line["eval_loss"]
