"""HTM alone on models with stages: saliency by the models' own maps, mixing, refusals."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.conftest import CLASSES
from tokenmixup import Adapter, attach, check_adapter, mix_horizontal, training_loss, why_not
from tokenmixup.adapters import adapter_of
from tokenmixup.encoder import find_encoder
from tokenmixup.module import BlockPass

ALL: dict[str, Any] = {"tau": math.inf, "rho": 0.0}
SWIN: dict[str, Any] = {"img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (2, 2, 2, 2)}
PVT: dict[str, Any] = {"embed_dims": (16, 32, 40, 64), "depths": (1, 2, 1, 1)}
# name, sizes, pixels, blocks that begin a stage and some that do not
MODELS: dict[str, tuple[str, dict[str, Any], int, tuple[int, ...]]] = {
    "swin": ("swin_tiny_patch4_window7_224", SWIN, 64, (0, 1, 2, 3, 5, 6)),
    "swin, padded": ("swin_tiny_patch4_window7_224", {**SWIN, "img_size": 56}, 56, (1, 3)),
    "swin, any size": (
        "swin_tiny_patch4_window7_224",
        {**SWIN, "strict_img_size": False},
        96,
        (1,),
    ),
    "swin v2": ("swinv2_tiny_window8_256", SWIN, 64, (0, 1, 3)),
    "pvt v2": ("pvt_v2_b0", PVT, 64, (0, 1, 2, 4)),
    "pvt v2, pooled": ("pvt_v2_b2_li", PVT, 64, (0, 1, 2, 4)),
    "hiera": ("hiera_tiny_224", {"img_size": 64, "embed_dim": 24}, 64, (0, 1, 3, 5, 9)),
}


LIKE_OTHERS = ("swin", "swin, any size", "pvt v2, pooled")
KINDS = [pytest.param(x, marks=pytest.mark.slow) if x in LIKE_OTHERS else x for x in MODELS]


def built(kind: str) -> nn.Module:
    torch.manual_seed(0)
    name, sizes, _, _ = MODELS[kind]
    model = timm.create_model(name, num_classes=CLASSES, drop_path_rate=0.0, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch(kind: str, size: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    pixels = MODELS[kind][2]
    targets = torch.randn(size, CLASSES, generator=generator).softmax(dim=1)
    return torch.randn(size, 3, pixels, pixels, generator=generator), targets


class Maps(TorchFunctionMode):
    """Keeps the attention maps that the model computes."""

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "softmax":
            self.maps.append(out)
        return out


def entries_and_maps(model: nn.Module, images: Tensor) -> list[tuple[BlockPass, Tensor]]:
    """The input of each block, and the map of its own attention."""
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", False)
    encoder, entries = find_encoder(model), list[BlockPass]()

    def keep(index: int, args: tuple[Any, ...]) -> None:
        tokens = args[0].flatten(1, -2)
        entries.append(BlockPass(encoder, index, tokens, {}, called=args))

    for index, block in enumerate(encoder.blocks):
        block.module.register_forward_pre_hook(lambda _, args, i=index: keep(i, args))
    with torch.no_grad(), Maps() as mode:
        model.eval()(images)
    return list(zip(entries, mode.maps, strict=True))


def by_hand(entry: BlockPass, attn: Tensor) -> Tensor:
    """Averages a map over heads and queries, token by token."""
    block, x = entry.block.module, entry.called[0]
    received = attn.mean(dim=-2).mean(dim=1)  # over queries and heads
    if hasattr(block, "shift_size"):
        return _of_windows(block, received, *x.shape[:3])
    if len(entry.called) == 2:
        return _of_fewer_keys(received, *entry.called[1])
    if attn.ndim == 4:  # global
        return received
    windows = received.shape[1]  # token i of Hiera is in window i % windows
    tokens = [received[:, i % windows, i // windows] for i in range(x.shape[1])]
    return torch.stack(tokens, dim=1) / windows


def _of_windows(block: Any, received: Tensor, b: int, rows: int, columns: int) -> Tensor:
    (height, width), (down, right) = block.window_size, block.shift_size
    across = -(-columns // width)
    received = received.view(b, -1, height * width)
    saliency = torch.empty(b, rows, columns)
    for y in range(rows):
        for x in range(columns):
            # the place in the shifted map, which is padded at the bottom and on the right
            i, j = (y - down) % rows, (x - right) % columns
            window = (i // height) * across + j // width
            saliency[:, y, x] = received[:, window, (i % height) * width + j % width]
    return (saliency / saliency.sum(dim=(1, 2), keepdim=True)).flatten(1)


def _of_fewer_keys(received: Tensor, rows: int, columns: int) -> Tensor:
    side = math.isqrt(received.shape[1])
    keys = [
        (y * side // rows) * side + x * side // columns for y in range(rows) for x in range(columns)
    ]
    return received[:, keys] / received[:, keys].sum(dim=1, keepdim=True)


@pytest.mark.parametrize("kind", KINDS)
def test_saliency_is_that_of_the_models_own_attention(kind: str):
    images, _ = batch(kind)
    uneven = 0.0
    for entry, attn in entries_and_maps(built(kind), images):
        found, expected = entry.own_saliency(), by_hand(entry, attn)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found.sum(dim=1), torch.ones(len(images)))
        uneven = max(uneven, float(expected.std() / expected.mean()))
    assert uneven > 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_mixes_and_evaluation_is_the_plain_model(kind: str):
    model = built(kind)
    plain, data = copy.deepcopy(model).eval(), batch(kind)
    for layer in MODELS[kind][3]:
        module = attach(model, CLASSES, htm={"layer": layer, **ALL}).train()
        output = module(*data)
        assert output.stats["mixed_samples"] == 3 and output.stats["mixed_tokens"] > 0
        training_loss(output, 0.5).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
        with torch.no_grad():
            assert torch.equal(module.eval()(data[0]), plain(data[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_block_gets_the_tokens_that_are_mixed_by_hand(kind: str):
    model, (images, targets) = built(kind), batch(kind)
    for layer in MODELS[kind][3][-2:]:
        module = attach(copy.deepcopy(model), CLASSES, htm={"layer": layer, **ALL}).train()
        output, plain = module(images, targets), copy.deepcopy(model).train()
        found = []

        def mix(block: Any, args: tuple[Any, ...], layer: int = layer, found: list = found) -> Any:
            tokens = args[0].flatten(1, -2)
            entry = BlockPass(find_encoder(model), layer, tokens, {}, called=args)
            hard = torch.zeros(len(tokens))
            found.append(mix_horizontal(tokens, targets, entry.own_saliency(), hard, 1.0, 0.0))
            return found[0].tokens.view_as(args[0]), *args[1:]

        find_encoder(plain).blocks[layer].module.register_forward_pre_hook(mix)
        assert torch.equal(output.logits, plain(images))
        assert torch.equal(output.mask, found[0].mask) and found[0].mask.any()
        assert torch.equal(output.targets, found[0].targets)


@pytest.mark.parametrize("kind", ["swin", "pvt v2", "hiera"])
def test_checkpointing_and_autocast_mix_as_well(kind: str):
    model, data = built(kind), batch(kind)
    outputs = []
    for options in ({}, {"checkpoint_blocks": True}):
        module = attach(model, CLASSES, htm={"layer": 2, **ALL}, **options)
        torch.manual_seed(2)
        for parameter in module.scorenets.parameters():
            nn.init.normal_(parameter)
        outputs.append(module.train()(*data))
        model.zero_grad()
        training_loss(outputs[-1], 0.5).backward()
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    with torch.autocast("cpu", torch.bfloat16):
        output = module(*data)
    assert output.logits.isfinite().all() and output.stats["mixed_tokens"] > 0


@pytest.mark.parametrize(
    "settings",
    [{"detector": "gradient"}, {"detector": "random"}, {"detector": "mean_attention"}],
    ids=lambda x: x["detector"],
)
@pytest.mark.parametrize("kind", ["swin, padded", "pvt v2"])
def test_other_detectors_mix_and_so_does_manifold_mixup(kind: str, settings: dict[str, Any]):
    module = attach(
        built(kind),
        CLASSES,
        htm={"layer": 2, **ALL, **settings},
        manifold_mixup={"layers": [0, 1, 3]},
    )
    output = module.train()(*batch(kind))
    training_loss(output, 0.5).backward()
    assert output.stats["mixed_tokens"] > 0


def test_layers_of_one_stage_are_counted_over_all_blocks():
    module = attach(built("swin"), CLASSES, htm={"layer": [4, 5], **ALL}).train()
    output = module(*batch("swin"))
    assert [mix.layer for mix in output.layers] == [4, 5]
    assert output.mask is not None and output.mask.shape == (3, 16)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"vtm": {"layer": 2}}, "vtm.layer=2: needs attention over all tokens, which Swin"),
        ({"htm": {"layer": 1, "rollout_steps": 1}}, "htm.rollout_steps=1: needs attention over"),
        (
            {"htm": {"layer": [1, 2]}},
            "htm.layer: blocks [1, 2] of SwinTransformer must lie in one stage",
        ),
        ({"htm": {"layer": 8}}, "htm.layer=8: SwinTransformer has blocks 0..7"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(settings: dict[str, Any], reason: str):
    with pytest.raises(ValueError) as error:
        attach(built("swin"), CLASSES, **settings)
    assert str(error.value).startswith(reason)


def test_models_that_cannot_be_served_are_refused():
    model: Any = built("swin")
    foreign = nn.Identity()
    foreign.dim = 48  # type: ignore[assignment]
    model.layers[1].blocks[0].attn = foreign
    assert "block 2 is SwinTransformerBlock, whose Identity is not timm." in str(why_not(model))
    with pytest.raises(ValueError, match=r"gradient: needs blocks with tokens in the order of the"):
        attach(built("hiera"), CLASSES, htm={"layer": 1, "detector": "gradient"})
    for kind in ("swin", "hiera"):
        model = built(kind)
        module = attach(model, CLASSES, htm={"layer": 1}).train()
        model.set_grad_checkpointing()
        with pytest.raises(ValueError, match="checkpoint_blocks=True"):
            module(*batch(kind))


class Maps4d(nn.Module):
    """A model of convolutions, whose blocks get maps with channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.stages = nn.ModuleList(
            nn.ModuleDict({"blocks": nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in "ab")})
            for _ in "ab"
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for stage in self.stages:
            for block in stage["blocks"]:
                x = block(x)
        return self.head(x.mean(dim=(2, 3)))


def to_tokens(x: Tensor) -> Tensor:
    return x.flatten(2).mT


def from_tokens(tokens: Tensor, x: Tensor) -> Tensor:
    return tokens.mT.reshape(x.shape)


def by_magnitude(block: nn.Module, x: Tensor) -> Tensor:
    size = x.square().mean(dim=1).flatten(1)
    return size / size.sum(dim=1, keepdim=True)


def test_an_adapter_of_tokens_and_saliency_serves_maps_of_any_model():
    adapter = Adapter(
        blocks="stages.*.blocks",
        embed_dim="block.in_channels",
        patch_embed="stem",
        tokens=(to_tokens, from_tokens),
        saliency=by_magnitude,
    )
    images, targets = torch.randn(3, 3, 32, 48), torch.eye(CLASSES)[:3]
    assert check_adapter(Maps4d(), adapter, images) == 96
    for told in (adapter, replace(adapter, saliency=None)):
        htm = {"layer": 3, **ALL, "detector": "attention" if told.saliency else "gradient"}
        output = attach(Maps4d(), CLASSES, htm=htm, adapter=told).train()(images, targets)
        assert output.mask is not None and output.mask.any() and output.mask.shape == (3, 96)
    with pytest.raises(ValueError, match=r"detector=attention: needs Adapter.parts or Adapter.sal"):
        attach(Maps4d(), CLASSES, htm={"layer": 3}, adapter=replace(adapter, saliency=None))


def test_check_adapter_says_what_is_wrong_with_tokens_and_saliency():
    images, _ = batch("pvt v2")
    own = adapter_of(built("pvt v2"))
    assert check_adapter(built("pvt v2"), own, images) == 256
    for change, reason in (
        ({"embed_dim": 17}, "must be b n 17"),
        ({"tokens": (to_rows, torch.Tensor.view_as)}, "Adapter.tokens do not lead back"),
        ({"saliency": lambda block, x, size: x[:, 1:, 0]}, "must be b t, [3, 256]"),
        ({"saliency": lambda block, x, size: x[..., 0].abs()}, "must be >= 0 and sum to 1"),
    ):
        with pytest.raises(ValueError) as error:
            check_adapter(built("pvt v2"), replace(own, **change), images)
        assert reason in str(error.value)
    twice = built("pvt v2")
    once = twice.forward
    twice.forward = lambda x: once(x) + once(x)
    with pytest.raises(ValueError, match="is called 2 times, must be once, with its tokens first"):
        check_adapter(twice, own, images)
    with pytest.raises(ValueError, match="needs norm and attn, and excludes saliency"):
        replace(own, parts=lambda attention: attention)


def to_rows(x: Tensor) -> Tensor:
    return x.flip(1)
