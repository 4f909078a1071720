from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import CLASSES, small_cct
from tests.tokenmixup.test_any_transformer import watching
from tokenmixup import attach, attention_saliency, gradient_saliency, rollout_saliency
from tokenmixup.attention import Parts, attention_map, received
from tokenmixup.detectors import by_rollout
from tokenmixup.encoder import find_encoder
from tokenmixup.module import BlockPass
from tokenmixup.saliency import input_gradient


def random_map(b: int = 3, h: int = 2, n: int = 5) -> torch.Tensor:
    return torch.randn(b, h, n, n, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)


def test_attention_saliency_is_float32_and_detached():
    attn = random_map().bfloat16().requires_grad_()
    found = attention_saliency(attn)
    assert found.dtype == torch.float32
    assert not found.requires_grad


def test_attention_saliency_refuses_a_class_token_without_prefix():
    with pytest.raises(ValueError, match="num_prefix_tokens"):
        attention_saliency(random_map(), num_prefix_tokens=0, class_token=True)


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_rollout_saliency_is_the_product_with_later_maps_on_the_left(steps: int, prefix: int):
    generator = torch.Generator().manual_seed(2)
    maps = [torch.randn(3, 2, 6, 6, generator=generator).softmax(-1) for _ in range(steps + 1)]
    for class_token in {False, prefix > 0}:
        expected = []
        for sample in range(3):
            product = np.eye(6)
            for attn in maps:
                product = attn[sample].double().numpy().mean(axis=0) @ product
            expected.append(product[0] if class_token else product.mean(axis=0))
        found = rollout_saliency(maps, prefix, class_token)
        torch.testing.assert_close(
            found, torch.tensor(np.array(expected)[:, prefix:], dtype=torch.float32)
        )
        if steps == 0:
            attn = maps[0][:, :, :1] if class_token else maps[0]
            assert torch.equal(attention_saliency(attn, prefix, class_token), found)


def plain_map(block, x: Tensor) -> Tensor:
    heads, width = block.attn.num_heads, x.shape[-1] // block.attn.num_heads
    q, k, _ = block.attn.qkv(block.norm1(x)).chunk(3, dim=-1)
    q, k = (part.unflatten(-1, (heads, width)).transpose(1, 2) for part in (q, k))
    return (q @ k.mT / width**0.5).softmax(dim=-1)


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_rollout_runs_ahead_through_the_blocks(build, batch, steps: int, training: bool):
    """Without dropout and stochastic depth, and without a gradient, whatever the mode."""
    model = build().eval()
    with watching(model) as seen:
        model(batch[0])
    prefix = model.num_prefix_tokens
    maps = [
        plain_map(block, entered.tokens) for block, entered in zip(model.blocks, seen, strict=True)
    ]
    if training:
        model.train()
        for block in model.blocks:
            block.attn.proj_drop.p = 0.5
    entry = BlockPass(find_encoder(model), 1, seen[1].tokens, {})
    found = by_rollout(steps, entry)
    expected = rollout_saliency(maps[1 : steps + 2], prefix)
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad
    assert model.training == training


def test_rollout_leaves_the_block_that_attends_to_a_memory_as_it_is(build, batch):
    htm = {"layer": 1, "tau": float("inf"), "rho": 0.0}
    ahead = attach(build(), CLASSES, htm={**htm, "rollout_steps": 2}, vtm={"layer": 2})
    alone = attach(build(), CLASSES, htm={**htm, "rollout_steps": 2})
    expected, found = alone.mixed_pairs(*batch), ahead.mixed_pairs(*batch)
    assert expected is not None and found is not None
    assert torch.equal(found.mask, expected.mask)


def test_rollout_needs_its_blocks(build):
    with pytest.raises(ValueError, match=r"rollout_steps=4"):
        attach(build(), CLASSES, htm={"layer": 2, "rollout_steps": 2})


def test_input_gradient_is_that_of_each_samples_own_loss(build, batch):
    model, (images, targets) = build().eval(), batch
    found = input_gradient(model, images, targets)
    for i in range(len(images)):
        image = images[i : i + 1].clone().requires_grad_()
        F.cross_entropy(model(image), targets[i : i + 1]).backward()
        assert image.grad is not None
        expected = sum(image.grad[0, channel] ** 2 for channel in range(3)) ** 0.5
        torch.testing.assert_close(found[i], expected, atol=1e-6, rtol=1e-4)
    model.zero_grad()
    input_gradient(model, images, targets)
    assert all(p.grad is None or p.grad.abs().sum() == 0 for p in model.parameters())


def test_gradient_saliency_pools_to_the_grid_and_sums_to_one():
    pixels = torch.arange(32.0).reshape(1, 4, 8)
    found = gradient_saliency(pixels, 8)  # 2 x 4 tokens of 2 x 2 pixels
    blocks = pixels.reshape(2, 2, 4, 2).mean(dim=(1, 3)).flatten()
    torch.testing.assert_close(found[0], blocks / blocks.sum())
    assert torch.equal(gradient_saliency(torch.zeros(1, 4, 4), 4), torch.zeros(1, 4))
    with pytest.raises(ValueError, match="5 tokens form no grid"):
        gradient_saliency(pixels, 5)


class Mean(nn.Module):
    """Logits that depend on the images in one corner alone."""

    def forward(self, images: Tensor) -> Tensor:
        corner = images[:, :, :8, :8].mean(dim=(1, 2, 3))
        return torch.stack([corner, -corner], dim=1)


def test_gradient_saliency_finds_what_moves_the_loss():
    pixels = input_gradient(Mean(), torch.randn(2, 3, 32, 32), torch.eye(2))
    expected = torch.zeros(2, 16)
    expected[:, 0] = 1
    torch.testing.assert_close(gradient_saliency(pixels, 16), expected)


def test_the_gradient_detector_sees_no_dropout_and_leaves_modes_and_gradients_alone():
    images, targets = torch.randn(4, 3, 16, 16), torch.eye(CLASSES)[:4]
    htm = {"layer": 1, "tau": float("inf"), "rho": 0.0, "detector": "gradient"}
    module = attach(small_cct(attn_drop=0.4, drop_path=0.4), CLASSES, htm=htm).train()
    first, second = (module.traced(images, targets).pixels for _ in range(2))
    assert first is not None and second is not None and torch.equal(first, second)
    assert all(part.training for part in module.modules())
    assert all(p.grad is None for p in module.parameters())
    with torch.no_grad():  # as when pairs are drawn
        mix = module.mixed_pairs(images, targets)
    assert mix is not None and mix.mask.any()


@pytest.mark.parametrize(
    "settings",
    [{}, {"detector": "mean_attention"}, {"detector": "random"}, {"rollout_steps": 1}],
    ids=str,
)
def test_scores_that_float16_cannot_hold_mix_as_the_fused_attention_runs(
    build, batch, settings: dict[str, Any]
):
    """q and k of one block times 1,000: fused attention computes its scores in float32."""
    model = build()
    with torch.no_grad():
        for parameter in model.blocks[1].attn.qkv.parameters():
            parameter[: 2 * model.embed_dim] *= 1000
    htm = {"layer": 1, "tau": float("inf"), "rho": 0.0, **settings}
    module = attach(model, CLASSES, htm=htm, vtm={"layer": 2}).train()
    with torch.autocast("cpu", torch.float16):
        assert model(batch[0]).isfinite().all()
        output = module(*batch)
    assert output.logits.isfinite().all() and output.gain.isfinite().all()
    assert output.stats["mixed_tokens"] > 1


@pytest.mark.parametrize("autocasts", [True, False])
def test_saliency_of_float16_is_that_of_its_queries_and_keys_in_float64(autocasts: bool):
    generator = torch.Generator().manual_seed(0)
    q, k = (1000 * torch.randn(3, 2, 6, 8, generator=generator).half() for _ in range(2))
    told: dict[str, Any] = {"num_heads": 2, "proj": nn.Identity(), "training": False}
    attn = Parts(scale=8**-0.5, project=lambda x: (q, k, k), **told)
    expected = (q.double() @ k.double().mT * 8**-0.5).softmax(dim=-1)
    with torch.autocast("cpu", torch.float16, enabled=autocasts):
        whole = attention_map(attn, q)
        mean = received(attn, q, k, None)
    assert whole.dtype == mean.dtype == torch.float32
    torch.testing.assert_close(whole.double(), expected)
    torch.testing.assert_close(mean.double(), expected.mean(dim=(1, 2)))
