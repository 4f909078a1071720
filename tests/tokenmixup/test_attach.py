"""What `attach` makes of a model: the plain one where nothing mixes, a loss, figures, groups."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.data import resolve_model_data_config
from torch import Tensor, nn
from torch.testing import assert_close

from tests.conftest import (
    CLASSES,
    assert_nothing_is_left,
    gradients_of,
    normal,
    refused,
    runs_of,
    small_cct,
    small_vit,
)
from tokenmixup import HTM, VTM, attach, training_loss
from tokenmixup.saliency import by_gradient

INF = math.inf
ALL: dict[str, Any] = {"tau": INF, "rho": 0.002}  # every sample is mixed
BOTH: dict[str, Any] = {"htm": {"layer": 1, **ALL}, "vtm": {"layer": 2}}


def attached(model: nn.Module | None = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    return attach(model or small_vit(), CLASSES, **settings).train()


# Where nothing mixes


@pytest.mark.parametrize(
    "htm", [None, {"layer": 1, "tau": 0.0}, {"layer": 1, "tau": INF, "rho": INF}]
)
def test_htm_that_mixes_nothing_is_the_plain_model_bit_for_bit(images, targets, htm):
    output = attached(htm=htm)(images, targets)
    assert torch.equal(output.logits, small_vit().train()(images))
    assert torch.equal(output.targets, targets)
    assert output.stats["mixed_tokens"] == 0
    assert output.stats["mixed_samples"] == 0


@pytest.mark.parametrize(
    ("layer", "of_vtm", "more"),
    [(1, 2, {}), (2, 1, {}), (2, 2, {"detector": "gradient"}), (2, 2, {"rollout_steps": 1})],
)
def test_htm_that_replaces_nothing_beside_vtm_is_vtm_alone(images, targets, layer, of_vtm, more):
    """Whatever its detector: VTM chooses by the blocks' own maps."""
    htm = {"layer": layer, "tau": 9.0, "rho": INF, **more}
    vtm = {"layer": of_vtm}
    both = attached(htm=htm, vtm=vtm)(images, targets)
    alone = attached(vtm=vtm)(images, targets)
    assert_close(both.logits, alone.logits, atol=1e-6, rtol=1e-5)


def test_after_the_end_of_mixing_training_is_the_plain_model(images, targets):
    module = attached(**BOTH, manifold_mixup={"layers": [0]})
    module.stop_mixing()
    output = module(images, targets)
    assert torch.equal(output.logits, small_vit().train()(images))
    assert output.score_loss is None
    assert not any(p.requires_grad for p in module.scorenets.parameters())


# Loss and figures


def test_score_loss_uses_the_targets_that_entered(images, targets):
    output = attached(htm={"layer": 1, "score_loss_weight": 0.25, **ALL})(images, targets)
    assert not torch.equal(output.targets, targets)
    expected = F.cross_entropy(output.layers[0].score_logits, targets)
    assert_close(output.score_loss, expected)
    assert_close(output.stats["difficulty"], output.score_loss.detach())
    loss = F.cross_entropy(output.logits, output.targets)
    assert_close(training_loss(output), loss + 0.25 * output.score_loss)
    assert_close(training_loss(output, 2), loss + 2 * output.score_loss)


@pytest.mark.parametrize("stop", [True, False])
def test_stop_gradient_keeps_the_score_loss_from_the_model(images, targets, stop):
    module = attached(htm={"layer": 1, "stop_gradient": stop})
    module(images, targets).score_loss.backward()
    assert module.scorenets["1"].head.weight.grad is not None
    gets_none = not gradients_of(module.model)
    assert gets_none == stop


def half_easy(images: Tensor, targets: Tensor) -> dict[str, Any]:
    """Settings of two layers of HTM, at each of which some samples are easy."""
    unmixed = attached(htm={"layer": [1, 3], "tau": 0.0})(images, targets)
    tau = [float(mix.difficulty.detach().median()) for mix in unmixed.layers]
    return {"layer": [1, 3], "tau": tau, "rho": 0.002}


def test_figures_of_a_layer_count_easy_and_mixed_samples_and_replaced_tokens(images, targets):
    htm = half_easy(images, targets)
    output = attached(htm=htm)(images, targets)
    stats = output.stats
    for mix, tau in zip(output.layers, htm["tau"], strict=True):
        easy = mix.is_easy.sum()
        gains = mix.gain[mix.mask]
        assert torch.equal(mix.is_easy, mix.difficulty < tau)
        assert 0 < easy < 6
        mixed = mix.mask.any(dim=1).sum()
        assert stats[f"easy_samples/{mix.layer}"] == easy
        assert stats[f"mixed_samples/{mix.layer}"] == mixed
        assert stats[f"mixed_tokens/{mix.layer}"] == mix.mask.sum() / mixed
        assert stats[f"gain_max/{mix.layer}"] == gains.max()
        assert gains.max() > gains.min() > 0.002
        assert_close(stats[f"gain_mean/{mix.layer}"], gains.mean())
        assert not mix.gain[~mix.mask].any()
        assert not mix.mask[~mix.is_easy].any()


def test_figures_of_a_pass_count_what_any_layer_mixed(images, targets):
    module = attached(htm=half_easy(images, targets))
    output = module(images, targets)
    first, second = output.layers
    assert module.eval().mixed_pairs(images, targets).layer == first.layer == 1
    assert not module.training
    easy = first.is_easy | second.is_easy
    mask = first.mask | second.mask
    assert torch.equal(output.is_easy, easy)
    mixed = mask.any(dim=1).sum()
    assert output.stats["easy_samples"] == easy.sum()
    assert output.stats["mixed_samples"] == mixed
    assert_close(output.stats["mixed_tokens"], mask.sum() / mixed)
    difficulty = first.difficulty.mean() + second.difficulty.mean()
    assert_close(output.score_loss, difficulty)


# Precision, dropout, checkpointing


@pytest.mark.parametrize(("htm_layer", "steps"), [(1, 0), (2, 0), (1, 1)])
def test_autocast_loses_no_gradient_to_the_saliency_pass(images, targets, htm_layer, steps):
    """Casts that autocast cached without gradient would leave the block's weights without one."""
    module = attached(htm={"layer": htm_layer, "rollout_steps": steps}, vtm={"layer": 2})
    with torch.autocast("cpu", torch.bfloat16):
        output = module(images, targets)
    training_loss(output, 1.0).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def counted_step(
    checkpoint_blocks: bool, batch: tuple[Tensor, Tensor], **settings: Any
) -> tuple[dict[str, Tensor], list[int]]:
    """Gradients of a step of 5 blocks, and how often each has run."""
    model: Any = small_vit(attn_drop_rate=0.1, drop_path_rate=0.1, depth=5)
    module = attached(model, checkpoint_blocks=checkpoint_blocks, **settings)
    runs = runs_of(block.norm1 for block in model.blocks)
    torch.manual_seed(2)
    output = module(*batch)
    training_loss(output, 0.5).backward()
    return gradients_of(module), runs


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"htm": HTM(layer=1, **ALL), "vtm": VTM(layer=2)}, [0, 0, 0, 1, 1]), ({}, [1, 1, 1, 1, 1])],
)
def test_blocks_that_run_twice_have_the_same_gradients(images, targets, settings, expected):
    """All but those that something touches run again in the backward pass."""
    gradients, once = counted_step(False, (images, targets), **settings)
    same, twice = counted_step(True, (images, targets), **settings)
    assert_close(same, gradients, atol=0, rtol=0)
    assert np.subtract(twice, once).tolist() == expected


# The module around the model


def test_the_model_is_untouched_after_a_pass_and_after_failed_ones(images, targets):
    module = attached(**BOTH, checkpoint_blocks=True)
    module(images, targets)
    expected = module.eval()(images)
    broken = images.clone()
    broken[2] = float("nan")
    with refused("not finite", FloatingPointError):
        module.train()(broken, targets)
    assert_nothing_is_left(module)
    assert torch.equal(module.eval()(images), expected)


def test_what_timm_asks_a_model_for_is_the_models():
    assert attached(small_cct()).no_weight_decay() == set()
    assert resolve_model_data_config(attached()) == resolve_model_data_config(small_vit())


# What is no batch


def test_training_without_targets_is_refused(images):
    with refused("targets", TypeError):
        attached(htm={"layer": 1})(images, None)


def test_images_and_targets_of_other_shapes_are_refused(images, targets):
    module = attached(htm={"layer": 1})
    for wrong in ({"patches": images}, images[:, 0]):
        with refused("images"):
            module(wrong, targets)
    for wrong in (torch.arange(6), targets[:, :3], targets[:5]):
        with refused("targets"):
            module(images, wrong)


# What is changed beside `attach`


class LowRank(nn.Module):
    """A projection and a product of low rank beside it (LoRA)."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(normal(2, base.in_features, seed=4))
        self.up = nn.Parameter(normal(base.out_features, 2, seed=5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def add_low_rank(model: Any) -> None:
    for block in model.blocks:
        block.attn.qkv = LowRank(block.attn.qkv)


@pytest.mark.parametrize("is_late", [False, True])
def test_low_rank_adapters_mix_like_their_product_in_the_weights(images, targets, is_late):
    """Put in before `attach`, or after a pass."""
    model: Any = small_vit()
    if not is_late:
        add_low_rank(model)
    module = attached(model, **BOTH)
    if is_late:
        module(images, targets)
        add_low_rank(model)
    output = module(images, targets)
    merged: Any = small_vit()
    with torch.no_grad():
        for block in merged.blocks:
            low = LowRank(block.attn.qkv)
            block.attn.qkv.weight.add_(low.up @ low.down)
    expected = attached(merged, **BOTH)(images, targets)
    assert torch.equal(output.mask, expected.mask)
    assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-4)
    training_loss(output).backward()
    assert all(block.attn.qkv.up.grad is not None for block in model.blocks)


def test_a_detector_that_does_not_say_that_it_needs_the_gradient_gets_a_line_that_says_how(
    images, targets
):
    def detector(block_input: Any) -> Tensor:
        return by_gradient(block_input)

    with refused("takes_gradient = True"):
        attached(htm={"layer": 1, "detector": detector})(images, targets)
    setattr(detector, "takes_gradient", True)
    assert attached(htm={"layer": 1, "detector": detector, **ALL})(images, targets).mask.any()
