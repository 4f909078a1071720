"""Manifold mixup against the linear mix written out."""

from typing import Any

import pytest
import torch

from tests.conftest import CLASSES
from tokenmixup import ManifoldMixup, Output, attach
from tokenmixup.manifold import draw_manifold_mix


def test_a_mix_is_linear_in_tokens_and_targets():
    torch.manual_seed(0)
    tokens, targets = torch.randn(5, 3, 2), torch.eye(5)
    mix = draw_manifold_mix(ManifoldMixup(alpha=1.0, layers=[2]), tokens)
    assert mix.layer == 2 and 0 <= mix.keep_ratio <= 1
    assert sorted(mix.partner.tolist()) == [0, 1, 2, 3, 4]
    for i, j in enumerate(mix.partner.tolist()):
        for x in (tokens, targets):
            expected = mix.keep_ratio * x[i] + (1 - mix.keep_ratio) * x[j]
            torch.testing.assert_close(mix(x)[i], expected)


@pytest.mark.parametrize("alpha", [0.2, 2.0])
def test_kept_share_follows_the_beta_distribution_and_layers_are_drawn_evenly(alpha: float):
    torch.manual_seed(0)
    settings = ManifoldMixup(alpha=alpha, layers=[0, 3])
    mixes = [draw_manifold_mix(settings, torch.zeros(2, 1)) for _ in range(4000)]
    shares = torch.tensor([mix.keep_ratio for mix in mixes])
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.03)
    assert float(shares.var()) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.1)
    assert sum(mix.layer == 0 for mix in mixes) / 4000 == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_the_drawn_block_gets_the_linear_mix(build, batch, layer: int):
    images, targets = batch
    module = attach(build(), CLASSES, manifold_mixup={"alpha": 1.0, "layers": [layer]}).train()
    torch.manual_seed(4)
    mix = draw_manifold_mix(module.manifold_mixup, images)  # type: ignore[arg-type]
    torch.manual_seed(4)
    output = module(images, targets)
    assert isinstance(output, Output)
    model: Any = build().train()
    model.blocks[layer].register_forward_pre_hook(lambda block, args: (mix(args[0]),))
    torch.testing.assert_close(output.logits, model(images))
    torch.testing.assert_close(output.targets, mix(targets))
    assert output.stats["mixed_samples"] == 0


def test_manifold_mixup_comes_before_htm_at_the_same_block(build, batch):
    """HTM then pairs the mixed samples, and ScoreNet is measured against their targets."""
    images, targets = batch
    htm = {"layer": 1, "tau": float("inf"), "rho": float("inf")}
    module = attach(build(), CLASSES, htm=htm, manifold_mixup={"layers": [1]}).train()
    torch.manual_seed(4)
    output = module(images, targets)
    torch.manual_seed(4)
    mix = draw_manifold_mix(module.manifold_mixup, images)  # type: ignore[arg-type]
    assert isinstance(output, Output)
    torch.testing.assert_close(output.targets, mix(targets))
    expected = torch.nn.functional.cross_entropy(output.layers[0].score_logits, mix(targets))
    torch.testing.assert_close(output.score_loss, expected)
