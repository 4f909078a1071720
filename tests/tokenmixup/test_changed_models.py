"""Blocks are looked up in each pass, so a model may change before or after `attach`.

A change after a pass is as one before `attach`. With tau=0, logits and gradients are the changed
model's own. Low-rank adapters mix like their product in the weights.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn
from torch.testing import assert_close

from tests.conftest import CLASSES, gradients_of
from tests.tokenmixup.models import BOTH, batch, randomized, vit
from tokenmixup import Output, attach, training_loss


def insert_a_block(model: Any) -> None:
    model.blocks.insert(0, randomized(copy.deepcopy(model.blocks[3])))


def replace_attention(model: Any) -> None:
    model.blocks[2].attn = randomized(Attention(24, num_heads=3, qkv_bias=True))
    model.blocks[1].attn.qkv = randomized(nn.Linear(24, 72))


def hook_blocks(model: Any) -> None:
    model.blocks[1].register_forward_pre_hook(lambda block, args: (args[0] * 1.5,))
    model.blocks[2].register_forward_hook(lambda block, args, out: out * 1.5)


class LowRank(nn.Module):
    """A frozen projection and a product of low rank beside it (LoRA)."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(0.3 * torch.randn(2, base.in_features, generator=generator))
        self.up = nn.Parameter(0.3 * torch.randn(base.out_features, 2, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def add_low_rank(model: Any) -> None:
    for block in model.blocks:
        block.attn.qkv = LowRank(block.attn.qkv)


def merge_low_rank(model: Any) -> None:
    for block in model.blocks:
        low = LowRank(block.attn.qkv)
        with torch.no_grad():
            block.attn.qkv.weight.add_(low.up @ low.down)


CHANGES = (insert_a_block, replace_attention, hook_blocks, add_low_rank)


def step(change: Callable[[Any], None], is_late: bool, **settings: Any) -> tuple[Output, Any]:
    """A step of a model that is changed before `attach`, or after a pass; its gradients."""
    model = vit()
    if not is_late:
        torch.manual_seed(2)
        change(model)
    torch.manual_seed(0)
    module = attach(model, CLASSES, **settings).train()
    if is_late:
        module(*batch())
        module.zero_grad()
        torch.manual_seed(2)
        change(model)
    output = module(*batch())
    training_loss(output).backward()
    return output, gradients_of(model)


def assert_same(ours: Output, theirs: Output) -> None:
    assert_close(ours[:2], theirs[:2], rtol=1e-5, atol=1e-5)
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(one.mask, other.mask)
        assert one.mask.any()
        assert_close(one.saliency, other.saliency, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_a_pass_is_as_one_before_attach(change: Any):
    late, gradients = step(change, True, **BOTH)
    early, expected = step(change, False, **BOTH)
    assert_same(late, early)
    assert_close(gradients, expected, rtol=1e-5, atol=1e-5)


def test_low_rank_adapters_mix_like_their_product_in_the_weights():
    ours, _ = step(add_low_rank, True, **BOTH)
    theirs, _ = step(merge_low_rank, False, **BOTH)
    assert_same(ours, theirs)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_the_plain_one_where_nothing_mixes(change: Any):
    output, gradients = step(change, True, htm={"layer": 1, "tau": 0.0, "score_loss_weight": 0.0})
    images, targets = batch()
    plain = vit()
    torch.manual_seed(2)
    change(plain)
    logits = plain.train()(images)
    F.cross_entropy(logits, targets).backward()
    assert_close(output.logits, logits, rtol=1e-5, atol=1e-5)
    assert_close(gradients, gradients_of(plain), rtol=1e-5, atol=1e-5)
