"""Models of timm, the smallest of each kind; those marked slow run in `make check-models`."""

import copy
import warnings
from typing import Any

import pytest
import timm
import torch
from torch import nn

from tests.conftest import CLASSES
from tokenmixup import Output, attach, find_encoder, training_loss, why_not

SMALL = 64  # pixels, of models with stages; others get 4 x 4 tokens
KINDS = [
    "beit_base_patch16_224",
    "cait_xxs24_224",
    "deit_tiny_distilled_patch16_224",
    "deit3_small_patch16_224",
    "eva02_tiny_patch14_224",
    "flexivit_small",
    "hiera_tiny_224",
    "naflexvit_base_patch16_gap",
    "pvt_v2_b0",
    "pvt_v2_b2_li",
    "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256",
    "test_vit2",
    "test_vit3",
    "test_vit4",
    "test_vit_relpos",
    "vit_base_mci_224",
    "vit_base_patch16_siglip_224",
    "vit_little_patch16_reg4_gap_256",
    "vit_medium_patch16_clip_224",
    "vit_pe_core_tiny_patch16_384",
    "vit_small_patch14_reg4_dinov2",
    "vit_small_patch16_dinov3",
    "vit_small_patch16_rope_mixed_ape_224",
    "vit_small_r26_s32_224",
    "vit_srelpos_small_patch16_224",
    "vit_tiny_r_s16_p8_224",
]
REFUSED = {
    "resnet18": "its layers form stages",
    "swinv2_cr_tiny_224": "its layers form stages",
    "vgg11": "it has none",
    "xcit_nano_12_p16_224": "block 0 is XCABlock, not pre-norm self-attention",
    "mixer_s32_224": "block 0 is MixerBlock, which has no self-attention",
    "vit_base_patch16_rpn_224": "block 0 is ResPostBlock, not pre-norm self-attention",
    "vit_base_patch16_xp_224": "block 0 is ParallelScalingBlock, which has no self-attention",
    "vit_dwee_patch16_reg1_gap_256": "whose DiffAttention is not a softmax of q k^T",
    "convit_tiny": "block 0 is Block, not pre-norm self-attention",
}


def create(name: str, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated names
        return timm.create_model(name, num_classes=CLASSES, **options)


def small(name: str) -> tuple[nn.Module, int]:
    """Returns the model for small images, or for timm's default size if that is fixed."""
    with torch.device("meta"):
        full: Any = create(name)
    embedding = getattr(full, "patch_embed", None) or full.embeds
    has_stages = not find_encoder(full).has_parts
    size = SMALL if has_stages else 4 * embedding.feat_ratio(as_scalar=True)
    try:
        return create(name, img_size=size), size
    except (TypeError, AssertionError):
        return create(name), full.pretrained_cfg["input_size"][-1]


@pytest.mark.parametrize(
    "name", ["test_vit", *(pytest.param(name, marks=pytest.mark.slow) for name in KINDS)]
)
def test_a_model_trains_and_evaluates_as_the_plain_one(name: str):
    torch.manual_seed(0)
    model, size = small(name)
    plain = copy.deepcopy(model)
    htm = {"layer": 1, "tau": float("inf"), "rho": 0.0}
    vtm = {"layer": 2} if find_encoder(model).has_parts else None
    module = attach(model, CLASSES, htm=htm, vtm=vtm, manifold_mixup={"layers": [0, 1]})
    images = torch.randn(2, 3, size, size)
    output = module.train()(images, torch.eye(CLASSES)[:2])
    assert isinstance(output, Output)
    assert output.stats["mixed_samples"] == 2
    assert output.stats["mixed_tokens"] > 0
    loss = training_loss(output, score_loss_weight=1.0)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
    plain.load_state_dict(model.state_dict())  # for batch norm statistics of hybrid models
    with torch.no_grad():
        assert torch.equal(module.eval()(images), plain.eval()(images))


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_is_not_served_is_refused_with_the_reason(name: str):
    with torch.device("meta"):
        reason = why_not(create(name))
    assert reason is not None and REFUSED[name] in reason and "\n" not in reason
