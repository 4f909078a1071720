"""What is refused in one line: settings by their key, models when attached or first trained."""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import timm
import torch
from timm.layers import PatchDropout
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.conftest import CLASSES, refused, small_cct
from tests.tokenmixup.models import BOTH, ENCODED, batch, encoded, vit
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
    ("begins", "told"),
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
def test_settings_that_do_not_go_together_are_named(begins: str, told: dict[str, Any]):
    with refused(f"^{re.escape(begins)}"):
        attach(small_cct(), **{"num_classes": CLASSES, **told})


# Models: each row is what is done to one, which may return another, and what the line tells


class Row(NamedTuple):
    told: str
    change: Callable[[Any], Any]
    build: Callable[[], Any] = vit
    adapter: Adapter | None = None
    settings: dict[str, Any] = BOTH


ROWS: dict[str, Row] = {}


def row(told: str, **more: Any) -> Any:
    def enter(change: Any) -> Any:
        ROWS[change.__name__] = Row(told, change, **more)
        return change

    return enter


class Skipping(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self):
            if index != 1:
                x = block(x)
        return x


class Twice(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Rerunning(nn.Sequential):
    """Recomputes its blocks in the backward pass, by one of torch's two ways."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class AtOnce(Rerunning):
    reentrant = False


@row("block 2 .*fused_attn")
def softmax_of_its_own_with_vtm(model: Any) -> None:
    model.blocks[2].attn.fused_attn = False


@row("block 1")
def block_skipped(model: Any) -> None:
    model.blocks = Skipping(*model.blocks)


@row("runs again")
def block_shared(model: Any) -> None:
    model.blocks[1] = model.blocks[2]


@row("runs again|run once")
def blocks_run_twice(model: Any) -> None:
    model.blocks = Twice(*model.blocks)


@row("checkpoint_blocks=True")
def reentrant_checkpoint(model: Any) -> None:
    model.blocks = Rerunning(*model.blocks)


@row("checkpoint_blocks=True")
def checkpoint_that_is_not_reentrant(model: Any) -> None:
    model.blocks = AtOnce(*model.blocks)


@row("gets 9 tokens, must be those of evaluation, 17")
def patches_dropped_in_training(model: Any) -> None:
    model.patch_drop = PatchDropout(0.5)


@row("gets 20 tokens")
def prompts_behind_the_patches(model: Any) -> None:
    prompts = torch.zeros(4, 3, 24)
    model.norm_pre.register_forward_hook(lambda *args: torch.cat([args[-1], prompts], dim=1))


@row("gets 13 tokens", settings={"htm": {"layer": 1}})
def tokens_pruned(model: Any) -> None:
    model.norm_pre.register_forward_hook(lambda *args: args[-1][:, :13])


@row(
    "block 1 .*gets 17 tokens: without a prefix of 0, they are no square patches",
    adapter=Adapter(blocks="blocks", embed_dim="embed_dim"),
)
def prefix_that_nobody_says(model: Any) -> None:
    pass


@row("mask|causal", build=encoded, adapter=ENCODED)
def causal_attention(model: Any) -> None:
    mask = nn.Transformer.generate_square_subsequent_mask(16)
    model.masks = {"mask": mask, "is_causal": True}


@row("without a mask", build=encoded, adapter=ENCODED)
def padded_keys(model: Any) -> None:
    model.masks = {"src_key_padding_mask": torch.zeros(len(batch()[0]), 16, dtype=torch.bool)}


@row("first argument", build=encoded, adapter=ENCODED)
def tokens_by_keyword(model: Any) -> None:
    def forward(x: Tensor) -> Tensor:
        for layer in model.encoder.layers:
            x = layer(src=x)
        return x

    model.encoder.forward = forward


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_a_model_that_is_not_supported_is_refused_in_one_line(name: str, late: bool):
    of = ROWS[name]
    model = of.build()
    told = {"adapter": of.adapter, **of.settings}
    with refused(of.told):
        if late:  # once a pass has run, where the model was supported
            module = attach(model, CLASSES, **told).train()
            module(*batch())
            module.model = of.change(model) or model
        else:
            module = attach(of.change(model) or model, CLASSES, **told).train()
        module.train()(*batch())


def with_class_token() -> Any:
    """Timm's names, and nothing that says that the first token is no patch."""
    model: Any = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in "abc")
    model.embed_dim = 8
    model.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
    return model


def with_a_batch_norm() -> Any:
    model = vit()
    model.blocks[1].norm1 = nn.BatchNorm1d(17)
    return model


@pytest.mark.parametrize(
    ("told", "build", "settings"),
    [
        ("compiled", lambda: torch.compile(vit(), backend="eager"), BOTH),
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
        ("needs an Adapter", encoded, BOTH),
        ("class token", with_class_token, BOTH),
        ("block 1 .*BatchNorm1d", with_a_batch_norm, BOTH),
    ],
)
def test_attach_refuses_what_it_can_see_at_once(told: str, build: Any, settings: Any):
    model = build()
    with refused(told):
        attach(model, CLASSES, **settings)
