"""What is refused in one line: settings by their key, models when attached or first trained."""

import math
import re
from typing import Any

import pytest
import timm
import torch
from timm.layers import PatchDropout
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.conftest import CLASSES, refused, small_cct, small_vit
from tests.tokenmixup.models import build as build_kind
from tokenmixup import VTM, Adapter, attach

NAN = math.nan
INF = math.inf
VALUES: dict[str, dict[str, list[Any]]] = {  # beside layer=1
    "htm": {
        "layer": [1.0, 4, [1, 9], [1, 1], []],
        "tau": [-1.0, NAN, "2"],
        "rho": [-0.1, 1.5, NAN, [0.1, 0.2]],
        "score_loss_weight": [-1.0, INF],
        "stop_gradient": ["no"],
        "pooling": ["max"],
        "detector": ["salient"],
        "rollout_steps": [-1],
        "matching": ["best"],
        "labels": ["all"],
        "mask_rule": ["own"],
        "order": ["front"],
        "layr": [1],
    },
    "vtm": {
        "layer": [4, 0, [0, 2]],
        "kappa": [2.5, 0, [3, 1]],
    },
    "manifold_mixup": {"layers": [1, [], [1, 1], [9]], "alpha": [0.0, 0.005, "1"]},
}


@pytest.mark.parametrize("method", VALUES)
def test_a_value_out_of_range_is_named(method: str):
    for option, values in VALUES[method].items():
        for value in values:
            given = {option: value}
            if method != "manifold_mixup":
                given = {"layer": 1, **given}
            with refused(rf"^{method}\.{option}"):
                attach(small_cct(), CLASSES, **{method: given})


@pytest.mark.parametrize(
    ("begins", "settings"),
    [
        ("htm=True", {"htm": True}),
        ("htm=VTM", {"htm": VTM(layer=1)}),
        ("htm.layer: no value", {"htm": {}}),
        ("htm.tau", {"htm": {"layer": [1, 2], "tau": [1, 2, 3]}}),
        (
            "htm.layer=[1, 2]: must be one layer with order=published, which moves samples",
            {"htm": {"layer": [1, 2], "order": "published"}},
        ),
        (
            "htm.layer=[1, 2]: must be one layer with detector=gradient, whose saliency",
            {"htm": {"layer": [1, 2], "detector": "gradient"}},
        ),
        (
            "manifold_mixup.layers=[1]: must be above htm.layer=1 with detector=gradient",
            {"htm": {"layer": 1, "detector": "gradient"}, "manifold_mixup": {"layers": [1]}},
        ),
        ("htm.rollout_steps=1", {"htm": {"layer": 1, "rollout_steps": 1, "detector": "random"}}),
        ("htm.layer + htm.rollout_steps=4", {"htm": {"layer": 2, "rollout_steps": 2}}),
        ("vtm.kappa", {"vtm": {"layer": [1, 2], "kappa": [3, 0]}}),
    ],
)
def test_settings_that_do_not_go_together_are_named(begins: str, settings: dict[str, Any]):
    with refused(f"^{re.escape(begins)}"):
        attach(small_cct(), **{"num_classes": CLASSES, **settings})


# Models: what is done to one, and what the line says


BOTH: dict[str, Any] = {"htm": {"layer": 1}, "vtm": {"layer": 2}}


class Twice(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class EachTwice(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(block(x))
        return x


class Rerunning(nn.Sequential):
    """Recomputes its blocks in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def with_a_softmax_of_its_own(model: Any) -> None:
    model.blocks[2].attn.fused_attn = False


def with_blocks_that_run_twice(model: Any) -> None:
    model.blocks = Twice(*model.blocks)


def with_each_block_twice(model: Any) -> None:
    model.blocks = EachTwice(*model.blocks)


def with_a_checkpoint(model: Any) -> None:
    model.blocks = Rerunning(*model.blocks)


def with_patches_dropped(model: Any) -> None:
    model.patch_drop = PatchDropout(0.5)


def with_causal_attention(model: Any) -> None:
    forward = model.blocks[1].attn.forward
    model.blocks[1].attn.forward = lambda x, **_: forward(x, is_causal=True)


@pytest.mark.parametrize(
    ("line", "change"),
    [
        ("block 2 .*fused_attn", with_a_softmax_of_its_own),
        ("runs again|run once", with_blocks_that_run_twice),
        ("runs again", with_each_block_twice),
        ("checkpoint_blocks=True", with_a_checkpoint),
        ("gets 9 tokens, must be those of evaluation, 17", with_patches_dropped),
        ("block 1 .*attends causally", with_causal_attention),
    ],
)
def test_a_model_that_is_not_supported_is_refused_in_one_line(images, targets, line, change):
    model = small_vit()
    change(model)
    module = attach(model, CLASSES, **BOTH).train()
    with refused(line):
        module(images, targets)


def test_a_prefix_that_nobody_names_is_refused(images, targets):
    adapter = Adapter(blocks="blocks", embed_dim="embed_dim")
    module = attach(small_vit(), CLASSES, htm={"layer": 1}, adapter=adapter).train()
    with refused("block 1 .*gets 17 tokens: without a prefix of 0, they are no square patches"):
        module(images, targets)


def with_class_token() -> Any:
    """Timm's names, and nothing that says that the first token is no patch."""
    model: Any = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in "abc")
    model.embed_dim = 8
    model.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
    return model


def with_a_batch_norm(norm: nn.Module) -> Any:
    model: Any = small_vit()
    model.blocks[1].norm1 = norm
    return model


@pytest.mark.parametrize(
    ("line", "build", "settings"),
    [
        ("compiled", lambda: torch.compile(small_vit(), backend="eager"), BOTH),
        (
            "no sequence named blocks",
            lambda: timm.create_model("resnet18", num_classes=CLASSES),
            BOTH,
        ),
        ("vtm.layer", lambda: build_kind("swin")[0], {"vtm": {"layer": 2}}),
        (
            "rollout_steps",
            lambda: build_kind("swin")[0],
            {"htm": {"layer": 1, "rollout_steps": 1}},
        ),
        (
            "rollout_steps: must be 0",
            lambda: build_kind("rope of each block")[0],
            {"htm": {"layer": 1, "rollout_steps": 1}},
        ),
        (
            "vtm.class_token_offset=published: must be paper",
            lambda: build_kind("siglip")[0],
            {"vtm": {"layer": 1, "class_token_offset": "published"}},
        ),
        ("htm.layer=8", lambda: build_kind("swin")[0], {"htm": {"layer": 8}}),
        ("class token", with_class_token, BOTH),
        ("block 1 .*BatchNorm1d", lambda: with_a_batch_norm(nn.BatchNorm1d(17)), BOTH),
        ("block 1 .*BatchNorm2d", lambda: with_a_batch_norm(nn.BatchNorm2d(17)), BOTH),
    ],
)
def test_attach_refuses_what_it_can_see_at_once(line: str, build: Any, settings: Any):
    model = build()
    with refused(line):
        attach(model, CLASSES, **settings)
