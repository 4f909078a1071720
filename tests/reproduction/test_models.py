"""Models: dropout, parameters, MACs, positional embeddings, refusals, attention kernels."""

from typing import Any

import numpy as np
import pytest
import torch
from timm.layers import DropPath, PatchDropout
from torch import nn

from reproduction.models.build import (
    build_model,
    build_module,
    count_macs,
    count_parameters,
    without_weights,
)
from reproduction.models.cct import CCT
from reproduction.system.errors import UserError
from tests.conftest import small_cct
from tests.reproduction.conftest import config_of

IMAGENET = [f"table2/imagenet1k_{name}" for name in ("baseline", "htm", "vtm", "htm_vtm")]


def dropouts(*overrides: str) -> dict[str, float]:
    """Returns the rates of all dropouts of a training model; blocks are equal and unnumbered."""
    config = config_of(*overrides, needs_data=False)
    with torch.device("meta"):
        module = build_module(without_weights(config.model), config.augmentation, 1000)
    model: Any = module.model
    blocks = [_rates(block) for block in model.blocks]
    assert all(rates == blocks[0] for rates in blocks)
    outside = {name: p for name, p in _rates(model).items() if not name.startswith("blocks.")}
    return outside | {f"blocks.{name}": p for name, p in blocks[0].items()}


def _rates(module: nn.Module) -> dict[str, float]:
    kinds = nn.Dropout | PatchDropout | DropPath
    drops = {name: x for name, x in module.named_modules() if isinstance(x, kinds)}
    return {name: getattr(x, "p", getattr(x, "drop_prob", None)) for name, x in drops.items()}


@pytest.mark.parametrize("experiment", [*IMAGENET, "published/imagenet1k_htm_vtm"])
def test_imagenet_runs_have_the_published_dropout(experiment: str):
    assert dropouts(f"experiment={experiment}") == {
        "pos_drop": 0.1,
        "head_drop": 0.0,
        "blocks.attn.attn_drop": 0.0,
        "blocks.attn.proj_drop": 0.0,
        "blocks.mlp.drop1": 0.1,
        "blocks.mlp.drop2": 0.1,
    }


def test_vit_dropout_options_equal_timms_except_mlp_drop_rate():
    model = "model=vit_tiny_patch16_224"
    rates = dropouts(model, "model.pos_drop_rate=0.2", "model.proj_drop_rate=0.3")
    assert rates == {
        "pos_drop": 0.2,
        "head_drop": 0.0,
        "blocks.attn.attn_drop": 0.0,
        "blocks.attn.proj_drop": 0.3,
        "blocks.mlp.drop1": 0.3,
        "blocks.mlp.drop2": 0.3,
    }
    rates = dropouts(model, "model.proj_drop_rate=0.3", "model.mlp_drop_rate=0")
    assert rates["blocks.attn.proj_drop"] == 0.3
    assert rates["blocks.mlp.drop1"] == rates["blocks.mlp.drop2"] == 0.0


def count(classes: int, *overrides: str) -> int:
    config = config_of(*overrides)
    with torch.device("meta"):
        return count_parameters(build_module(config.model, config.augmentation, classes))


@pytest.mark.parametrize(
    ("model", "stack", "classes", "parameters"),
    [
        ("cct_7_3x1", "[]", 100, 3_783_269),
        ("cct_7_3x1", "[htm]", 100, 3_809_226),
        ("cct_7_3x1", "[vtm]", 100, 3_783_269),
        ("cct_7_3x1", "[htm,vtm]", 100, 3_809_226),
        ("vit_base_patch16_224", "[]", 1000, 86_567_656),
        ("vit_base_patch16_224", "[htm]", 1000, 87_336_656),
        ("vit_tiny_patch16_224", "[vtm]", 1000, 5_717_416),
    ],
)
def test_parameters_equal_the_papers(model, stack, classes, parameters):
    assert count(classes, f"model={model}", f"augmentation={stack}") == parameters


def test_macs_of_cct_7_3x1_include_attention():
    config = config_of("model=cct_7_3x1")
    macs = count_macs(build_model(config.model, 100), 32)
    assert macs.total == pytest.approx(1.1816e9, rel=1e-4)
    assert macs.with_weights == pytest.approx(0.9467e9, rel=1e-4)


@pytest.mark.parametrize("option", ["learnable", "sine"])
def test_cct_positional_embeddings_match_their_option(option):
    config = config_of(f"model.positional_embedding={option}")
    model = build_model(config.model, 10)
    assert isinstance(model, CCT)
    assert model.pos_embed.requires_grad == (option == "learnable")
    if option == "sine":
        position, i = 5, 7
        angle = position / 10000 ** (2 * i / 128)
        assert float(model.pos_embed[0, position, 2 * i]) == pytest.approx(np.sin(angle), abs=1e-5)
        cosine = float(model.pos_embed[0, position, 2 * i + 1])
        assert cosine == pytest.approx(np.cos(angle), abs=1e-5)


def test_cct_stochastic_depth_rises_linearly():
    rates = [
        getattr(block.drop_path, "drop_prob", 0.0) for block in small_cct(drop_path=0.3).blocks
    ]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])


def tiny_vit(*overrides: str):
    return config_of("model=vit_tiny_patch16_224", *overrides).model


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.architecture=vit_nope", "model.architecture=vit_nope"),
        ("model.pretrained=nope", "no tag of vit_tiny_patch16_224, allowed: .*augreg_in21k"),
        ("model.depth=5", "model.depth=5: .* has 12 blocks"),
    ],
)
def test_vit_refuses_unknown_timm_options(override, message):
    with pytest.raises(UserError, match=message):
        build_model(tiny_vit(override), 10)


def test_vit_suggests_a_file_when_weights_cannot_be_downloaded(monkeypatch):
    def refuse(*args, **settings):
        raise OSError("no route to host")

    monkeypatch.setattr("timm.create_model", refuse)
    with pytest.raises(UserError, match=r"no route to host.*model.weights"):
        build_model(tiny_vit("model.pretrained=augreg_in21k_ft_in1k"), 1000)


@pytest.mark.parametrize(
    ("architecture", "options", "classes"),
    [
        ("cait_xxs24_224", ["model.depth=24"], 10),
        ("vit_base_patch16_siglip_224", ["model.global_pool=map"], 10),
        ("beit_base_patch16_224", ["model.global_pool=avg"], 10),
        ("eva02_base_patch16_clip_224", [], 10),
        ("vit_base_r50_s16_224", [], 10),  # a hybrid
    ],
)
def test_other_timm_transformers_are_built_checked_and_counted(architecture, options, classes):
    """The same steps as preflight and summary, on the meta device."""
    overrides = [f"model.architecture={architecture}", "augmentation=[htm,vtm]", *options]
    config = config_of("model=vit_tiny_patch16_224", *overrides)
    with torch.device("meta"):
        module = build_module(config.model, config.augmentation, classes)
    assert count_macs(module.model, 224).total > 1e9
    assert module.model.training


def test_kappa_above_the_number_of_tokens_is_refused():
    small = ("model.image_size=16", "augmentation=[vtm]")
    config_of(*small, "augmentation.vtm.kappa=16")
    with pytest.raises(UserError, match=r"vtm.kappa=17: cct_2_3x2 has 16 tokens"):
        config_of(*small, "augmentation.vtm.kappa=17")
