"""Small examples of the models that `attach` supports, and what they attend to.

The maps are seen by running a model without fused kernels; nothing of the library is used.
Letters: b batch, h heads, n tokens with prefix, t spatial tokens, w windows, d width.
"""

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
import torchvision
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.conftest import CLASSES, drawn_batch, small_cct, small_vit_lite
from tokenmixup import Adapter

SMALL: dict[str, Any] = {"depth": 3, "embed_dim": 48, "num_heads": 3}
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "intermediate_size": 64,
    "patch_size": 8,
    "num_labels": CLASSES,
}
SWIN: dict[str, Any] = {"img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (2, 2, 2, 2)}
PVT: dict[str, Any] = {"embed_dims": (16, 32, 40, 64), "depths": (1, 2, 1, 1)}


class Encoded(nn.Module):
    """Patches, torch's own encoder, the mean of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 32, 8, stride=8)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images).flatten(2).mT
        return self.head(self.encoder(tokens).mean(dim=1))


ENCODED = Adapter(blocks="encoder.layers", embed_dim=32)


class Attention(nn.Module):
    """Attention that calls no function for it."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(32, 32)
        self.keys = nn.Linear(32, 32)
        self.values = nn.Linear(32, 32)
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q = by_head(self.queries(x))
        k = by_head(self.keys(x))
        v = by_head(self.values(x))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


def by_head(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, -1)).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(32)
        self.mix = Attention()
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        x = x + self.mix(self.before(x))
        return x + self.mlp(x), "and something else"


class HandMade(nn.Module):
    """A ViT by names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, stride=4)
        self.first = nn.Parameter(torch.zeros(1, 1, 32))
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.classify = nn.Linear(32, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        first = self.first.expand(len(x), -1, -1)
        x = torch.cat([first, x], dim=1)
        for layer in self.layers:
            x, _ = layer(x)
        return self.classify(x[:, 0])


BY_HAND = Adapter(
    blocks="layers",
    embed_dim=32,
    num_prefix_tokens=1,
    reads_class_token=True,
)


def huggingface(name: str, **more: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**SIZES | more)
    return getattr(transformers, f"{name}ForImageClassification")(config)


class Example(NamedTuple):
    """How a model is built, and what `attach` must find out about it."""

    build: Callable[[], Any]  # a model, or it and its adapter
    prefix: int = 0
    reads: bool = False  # whether the class is read from the class token
    pixels: int = 32
    blocks: str = "blocks"
    layers: tuple[int, ...] = (0, 1, 2)
    stages: bool = False  # HTM alone
    vtm: bool = True  # of those without stages
    listed: str = "adapter"  # its name in docs/library.md

    @property
    def pooling(self) -> str:
        """What ScoreNet pools by."""
        return "class_token" if self.reads else "attention"


def of_timm(name: str, prefix: int = 1, reads: bool = False, **options: Any) -> Example:
    options = {"img_size": 64, **SMALL, **options}
    build = partial(timm.create_model, name, num_classes=CLASSES, **options)
    return Example(build, prefix, reads, pixels=64, listed=name)


def staged(name: str, layers: tuple[int, ...], pixels: int, blocks: str, **options: Any) -> Example:
    options = {"num_classes": CLASSES, "drop_path_rate": 0.0, **options}
    build = partial(timm.create_model, name, **options)
    return Example(build, pixels=pixels, blocks=blocks, layers=layers, stages=True, listed=name)


def of_transformers(name: str, *fields: Any, **more: Any) -> Example:
    build = partial(huggingface, name)
    return Example(build, *fields, **more, listed=f"{name}ForImageClassification")


EXAMPLES: dict[str, Example] = {
    "vit": of_timm("vit_tiny_patch16_224", 1, True),  # fused qkv
    "siglip": of_timm("vit_base_patch16_siglip_224", 0),  # attention pooling
    "registers": of_timm("vit_small_patch14_reg4_dinov2", 5, True, patch_size=16),  # layer scale
    "registers alone": of_timm("vit_little_patch16_reg4_gap_256", 4),
    "distilled": of_timm("deit_tiny_distilled_patch16_224", 2, True),
    "deit3": of_timm("deit3_small_patch16_224", 1, True),  # positions without the class token
    "normed queries": of_timm(
        "vit_small_patch16_224", 1, True, qk_norm=True, dynamic_img_size=True
    ),
    "naflexvit": of_timm("naflexvit_base_patch16_gap", 4),
    "eva02": of_timm("eva02_tiny_patch14_224", patch_size=16),  # rotary, SwiGLU
    "eva02 of clip": of_timm("eva02_base_patch16_clip_224", 1, True),  # q, k, v apart, a norm
    "rope of each block": of_timm("vit_small_patch16_rope_mixed_224", 1, True),
    "rope": of_timm("vit_betwixt_patch16_rope_reg4_gap_256", 4),
    "dinov3": of_timm("vit_small_patch16_dinov3_qkvb", 5),  # rotates halves
    "grouped": of_timm(
        "vit_small_patch16_dinov3_qkvb",
        prefix=5,
        num_kv_heads=1,
        qkv_fused=False,
        qk_norm=True,
        attn_type="rope",
    ),
    "perception encoder": of_timm("vit_pe_core_tiny_patch16_384", 1),
    "beit": of_timm("beit_base_patch16_224"),  # a relative position table in each block
    "relpos": of_timm("vit_relpos_small_patch16_224", 0),  # an MLP of them in each block
    "relpos, shared": of_timm("vit_srelpos_small_patch16_224", 0),  # and one for all
    "relpos, class token": of_timm("vit_relpos_medium_patch16_cls_224", 1, True),
    # talking heads: attention by a softmax of its own
    "cait": of_timm("cait_xxs24_224", 0, depth_token_only=1)._replace(vtm=False),
    "norms behind": of_timm("vit_base_patch16_rpn_224", 0),  # the attention
    "parallel": of_timm("vit_base_patch16_xp_224", 1, True),  # attention and MLP
    "cct": Example(small_cct, pixels=16, listed="CCT"),
    "vit-lite": Example(small_vit_lite, 1, True, 16, listed="CCT"),
    "torchvision": Example(
        lambda: torchvision.models.VisionTransformer(32, 8, 3, 4, 32, 64, num_classes=CLASSES),
        prefix=1,
        reads=True,
        blocks="encoder.layers",
        listed="torchvision.models.VisionTransformer",
    ),
    "hf vit": of_transformers("ViT", 1, True, blocks="vit.layers"),
    "hf deit": of_transformers("DeiT", 2, True, blocks="deit.layers"),
    "hf dinov2": of_transformers("Dinov2", prefix=1, blocks="dinov2.encoder.layer"),
    "encoder": Example(lambda: (Encoded(), ENCODED), blocks="encoder.layers"),
    "by hand": Example(
        lambda: (HandMade(), BY_HAND), 1, True, blocks="layers", vtm=False, listed="eager"
    ),
    "swin": staged(
        "swin_tiny_patch4_window7_224", (0, 1, 2, 3, 5, 6), 64, "layers.*.blocks", **SWIN
    ),
    "swin, padded": staged(
        "swin_tiny_patch4_window7_224", (1, 3), 56, "layers.*.blocks", **SWIN | {"img_size": 56}
    ),
    "swin v2": staged("swinv2_tiny_window8_256", (0, 1, 3), 64, "layers.*.blocks", **SWIN),
    "pvt v2": staged("pvt_v2_b0", (0, 1, 2, 4), 64, "stages.*.blocks", **PVT),
    "pvt v2, pooled": staged("pvt_v2_b2_li", (0, 1, 2, 4), 64, "stages.*.blocks", **PVT),
    "hiera": staged("hiera_tiny_224", (0, 1, 3, 5, 9), 64, "blocks", img_size=64, embed_dim=24),
}
QUICK = (  # the others are like one of these
    "vit",
    "registers",
    "normed queries",
    "naflexvit",
    "eva02",
    "rope of each block",
    "dinov3",
    "grouped",
    "beit",
    "relpos, class token",
    "cait",
    "parallel",
    "cct",
    "torchvision",
    "hf vit",
    "encoder",
    "by hand",
    "swin, padded",
    "swin v2",
    "pvt v2",
    "hiera",
)
WITH_MEMORY = [name for name, example in EXAMPLES.items() if example.vtm and not example.stages]


def build(name: str) -> tuple[Any, Adapter | None]:
    """A model with random positions, biases and layer scales as well, without dropout."""
    torch.manual_seed(0)
    example = EXAMPLES[name]
    model = example.build()
    adapter = None
    if isinstance(model, tuple):
        model, adapter = model
    noise = 0.1
    if example.pixels == 64 and not example.stages:
        noise = 0.2
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", True)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, adapter


def batch_of(name: str, size: int = 4) -> tuple[Tensor, Tensor]:
    return drawn_batch(size, EXAMPLES[name].pixels)


def blocks_of(name: str, model: Any) -> list[Any]:
    blocks = [model]
    for path in EXAMPLES[name].blocks.split(".*."):
        blocks = [block for stage in blocks for block in stage.get_submodule(path)]
    return blocks


def logits_of(out: Any) -> Tensor:
    return getattr(out, "logits", out)


# What the model itself attends to


class Call(NamedTuple):
    """What enters a block, and the map that it computes there, `b h (w) n m`."""

    args: tuple[Any, ...]
    given: dict[str, Any]
    attn: Tensor | None = None


def recorded(blocks: Iterable[nn.Module]) -> list[Call]:
    """The calls of blocks from now on, without their maps."""
    calls: list[Call] = []

    def record(block: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        calls.append(Call(args, given))

    for block in blocks:
        block.register_forward_pre_hook(record, with_kwargs=True)
    return calls


class Maps(TorchFunctionMode):
    """Keeps the attention maps of a model that computes them by softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            options = {"need_weights": True, "average_attn_weights": False}
            _, attn = func(*args, **kwargs | options)
            self.maps.append(attn)
        out = func(*args, **kwargs)
        if getattr(func, "__name__", "") == "softmax":
            self.maps.append(out)
        return out


def calls_of(name: str, model: Any, images: Tensor) -> list[Call]:
    """Runs a copy of the model without fused kernels; a call of each block."""
    model = copy.deepcopy(model).train()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", False)
    if isinstance(model, transformers.PreTrainedModel):
        model.set_attn_implementation("eager")
    calls = recorded(blocks_of(name, model))
    with torch.no_grad(), Maps() as mode:
        model(images)
    return [x._replace(attn=attn) for x, attn in zip(calls, mode.maps, strict=False)]


def saliency_of(name: str, block: Any, call: Call) -> Tensor:
    """Eq. 3 by a block's own map, token by token: `b t`."""
    example = EXAMPLES[name]
    attn = call.attn
    x = call.args[0]
    assert attn is not None
    if not example.stages:
        attn = attn.mean(dim=1)
        if example.reads:
            attn = attn[:, :1]
        return attn.mean(dim=1)[:, example.prefix :]
    received = attn.mean(dim=-2).mean(dim=1)  # over queries and heads
    if hasattr(block, "shift_size"):
        return of_windows(block, received, *x.shape[:3])
    if len(call.args) == 2:
        return of_fewer_keys(received, *call.args[1])
    if attn.ndim == 4:  # of all tokens
        return received
    windows = received.shape[1]  # token i of Hiera is in window i % windows
    tokens = [received[:, i % windows, i // windows] for i in range(x.shape[1])]
    return torch.stack(tokens, dim=1) / windows


def of_windows(block: Any, received: Tensor, b: int, rows: int, columns: int) -> Tensor:
    (height, width), (down, right) = block.window_size, block.shift_size
    across = -(-columns // width)
    received = received.view(b, -1, height * width)
    saliency = torch.empty(b, rows, columns)
    for y in range(rows):
        for x in range(columns):
            # row and column in the shifted map, which is padded at the bottom and on the right
            i = (y - down) % rows
            j = (x - right) % columns
            window = (i // height) * across + j // width
            place = (i % height) * width + j % width
            saliency[:, y, x] = received[:, window, place]
    total = saliency.sum(dim=(1, 2), keepdim=True)
    return (saliency / total).flatten(1)


def of_fewer_keys(received: Tensor, rows: int, columns: int) -> Tensor:
    side = math.isqrt(received.shape[1])
    keys = []
    for y in range(rows):
        for x in range(columns):
            keys.append((y * side // rows) * side + x * side // columns)
    saliency = received[:, keys]
    return saliency / saliency.sum(dim=1, keepdim=True)
