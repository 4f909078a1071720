"""Where the blocks of a model are, and which of their tokens are patches.

`adapter_of` has the adapters of timm's models and of other known classes.
Letters: b batch, n tokens with prefix, t spatial tokens, d width, w windows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tokenmixup.attention import AttentionMap

# Methods of timm's models that decide which tokens are the prefix and what the head reads.
DECIDING = ("_pos_embed", "forward_features", "forward_head", "pool")


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Describes where a model keeps its blocks, and what their tokens are.

    Paths are dotted, such as `encoder.layers`; in `blocks`, `*` is every module of a sequence. A
    block gets its tokens first, `b n d` or a map `b rows columns d`, and returns them first. HTM
    and VTM work with blocks that compute one softmax over all of their tokens. HTM alone works with
    `geometry`, the maps of windows or of fewer keys, and with `saliency`, whatever the attention.
    """

    blocks: str  # path from the model to the sequence of blocks, such as `layers.*.blocks`
    embed_dim: str | int  # width of the tokens, or the path to it from the model or from `block`
    num_prefix_tokens: int = 0  # tokens before the spatial tokens
    reads_class_token: bool = False  # whether the head reads token 0 and no patch
    # Path from the model to the module whose output has a token for each patch: `b t d`,
    # `b rows columns d`, or of a convolution `b d rows columns`. By default `patch_embed` beside
    # the blocks, if there is one, and they are one sequence and attend to all.
    patch_embed: str | None = None
    square_patches: bool = False  # whether their grid has the image's aspect ratio
    in_rows: bool = True  # whether spatial tokens are in the order of the image, row by row
    # The block, its attention map and its arguments, also by name -> saliency `b t` of its input
    geometry: Callable[..., Tensor] | None = None
    # The block and its arguments -> saliency `b t`, if it computes no softmax
    saliency: Callable[..., Tensor] | None = None

    def __post_init__(self) -> None:
        prefix = self.num_prefix_tokens
        if type(prefix) is not int or prefix < 0:
            raise ValueError(f"Adapter.num_prefix_tokens={prefix!r}: must be an int >= 0")
        if self.reads_class_token and not prefix:
            raise ValueError("Adapter.reads_class_token=True: needs num_prefix_tokens >= 1")

    @property
    def attends_to_all(self) -> bool:
        """Whether each block computes a softmax over all of its tokens."""
        return self.geometry is None and self.saliency is None


def swin(block: Any, seen: AttentionMap, x: Tensor) -> Tensor:
    """Saliency of a block of Swin or Swin-V2, `b rows columns d`: attention over shifted windows.

    Windows that overlap the edge are padded; the share of the padding is lost.
    """
    rows, columns, (i, j), shift = *x.shape[1:3], block.window_size, block.shift_size
    down, across = -(-rows // i), -(-columns // j)
    sewn = rearrange(seen.received(), "(b y x) (i j) -> b (y i) (x j)", y=down, x=across, i=i)
    return torch.roll(sewn[:, :rows, :columns], tuple(shift), dims=(1, 2)).flatten(1)


def pvt_v2(block: Any, seen: AttentionMap, x: Tensor, size: tuple[int, int]) -> Tensor:
    """Saliency of a block of PVT-v2, `b t d` in the grid `size`: that of fewer keys, resized."""
    received = seen.received()
    rows = round(math.sqrt(received.shape[1] * size[0] / size[1]))
    grid = received.unflatten(1, (rows, -1))[:, None]
    return F.interpolate(grid, tuple(size), mode="nearest").flatten(1)


def hiera(block: Any, seen: AttentionMap, x: Tensor) -> Tensor:
    """Saliency of a block of Hiera, `b t d` in its own order: by mask units, or over all tokens."""
    received = seen.received()
    return received if received.ndim == 2 else rearrange(received, "b w n -> b (n w)")


def _stages(blocks: str, geometry: Callable[..., Tensor], **more: Any) -> Adapter:
    width = "block.attn.dim"
    return Adapter(blocks=blocks, embed_dim=width, square_patches=True, geometry=geometry, **more)


def _huggingface(name: str, blocks: str, prefix: int, reads_class_token: bool = True) -> Adapter:
    return Adapter(
        blocks=f"{name}.{blocks}",
        embed_dim="config.hidden_size",
        patch_embed=f"{name}.embeddings.patch_embeddings.projection",
        num_prefix_tokens=prefix,
        reads_class_token=reads_class_token,
    )


HF, STAGES = "transformers.models", "timm.models"
ADAPTERS = {  # models that work without an adapter of the user's
    "torchvision.models.vision_transformer.VisionTransformer": Adapter(
        blocks="encoder.layers",
        embed_dim="hidden_dim",
        patch_embed="conv_proj",
        num_prefix_tokens=1,
        reads_class_token=True,
    ),
    f"{HF}.vit.modeling_vit.ViTForImageClassification": _huggingface("vit", "layers", 1),
    f"{HF}.deit.modeling_deit.DeiTForImageClassification": _huggingface("deit", "layers", 2),
    # its head reads the class token and the mean of the patches
    f"{HF}.dinov2.modeling_dinov2.Dinov2ForImageClassification": _huggingface(
        "dinov2", "encoder.layer", 1, reads_class_token=False
    ),
    f"{STAGES}.swin_transformer.SwinTransformer": _stages("layers.*.blocks", swin),
    f"{STAGES}.swin_transformer_v2.SwinTransformerV2": _stages("layers.*.blocks", swin),
    f"{STAGES}.pvt_v2.PyramidVisionTransformerV2": _stages("stages.*.blocks", pvt_v2),
    f"{STAGES}.hiera.Hiera": _stages("blocks", hiera, in_rows=False),
}


def adapter_of(model: Any) -> Adapter:
    """Returns the adapter of a known model class; that of timm's names for any other class."""
    # fully_shard makes a class of its own
    kind = next(kind for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP"))
    return ADAPTERS.get(f"{kind.__module__}.{kind.__name__}") or timm_adapter(model)


def timm_adapter(model: Any) -> Adapter:
    """Returns the adapter of a model with timm's names."""
    joins_later = hasattr(model, "blocks_token_only")  # CaiT's class token has blocks of its own
    prefix = 0 if joins_later else getattr(model, "num_prefix_tokens", 0)
    pools_token = getattr(model, "global_pool", None) == "token"
    sides = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    return Adapter(
        blocks="blocks",
        embed_dim="embed_dim",
        square_patches=not isinstance(sides, tuple) or len({*sides}) == 1,
        num_prefix_tokens=prefix,
        reads_class_token=pools_token and prefix > 0 and has_class_token(model),
    )


def has_class_token(model: nn.Module) -> bool:
    """Whether the model or its embedding has a parameter `cls_token`."""
    return any(name.rpartition(".")[2] == "cls_token" for name, _ in model.named_parameters())


def blocks_of(model: Any, adapter: Adapter | None = None) -> list[nn.Module]:
    """Returns the blocks of a transformer, over all stages.

    Raises ValueError with the one-line reason if there are none, or if nobody tells which of
    their tokens are the prefix.
    """
    if adapter is None:
        adapter = adapter_of(model)
        _check_timm(model, adapter)
    blocks = [model]
    for path in adapter.blocks.split(".*."):
        stages, blocks = blocks, []
        for stage in stages:
            part = _follow(stage, path, "blocks")
            if not isinstance(part, nn.Sequential | nn.ModuleList) or not len(part):
                found = f"is {type(part).__name__}, needs a Sequential or ModuleList of blocks"
                raise ValueError(f"Adapter.blocks={path!r}: {found}")
            blocks += part
    if len({id(block) for block in blocks}) < len(blocks):
        raise ValueError(f"Adapter.blocks={adapter.blocks!r}: holds one block more than once")
    return blocks


def name_of(index: int, block: nn.Module) -> str:
    return f"block {index} ({type(block).__name__})"


def width_of(model: Any, block: nn.Module, adapter: Adapter) -> int:
    """Returns the width of the tokens that enter a block."""
    width = told = adapter.embed_dim
    if isinstance(told, str):
        start = block if told.startswith("block.") else model
        width = _follow(start, told.removeprefix("block."), "embed_dim")
    if type(width) is not int:
        kind = type(model).__name__
        raise ValueError(f"{kind}: Adapter.embed_dim={told!r} is not the path of an int")
    return width


def patch_embed_of(model: Any, adapter: Adapter) -> nn.Module | None:
    """Returns the module whose output has one token for each patch, if it is known."""
    if adapter.patch_embed is not None:
        return _follow(model, adapter.patch_embed, "patch_embed")
    if not adapter.attends_to_all or "*" in adapter.blocks:
        return None
    beside = model.get_submodule(adapter.blocks.rpartition(".")[0])
    embed = getattr(beside, "patch_embed", None)
    return embed if isinstance(embed, nn.Module) else None


def _follow(start: Any, path: str, field: str) -> Any:
    """Returns what a path of the adapter leads to. Raises ValueError if the path is wrong."""
    try:
        return attrgetter(path)(start)
    except AttributeError as error:
        raise ValueError(f"Adapter.{field}={path!r}: {error}") from error


def _check_timm(model: Any, adapter: Adapter) -> None:
    """Raises ValueError if an adapter of the user's must say what this model's tokens are."""
    name, kinds = type(model).__name__, type(model).__mro__
    if adapter.blocks == "blocks" and not hasattr(model, "blocks"):
        raise ValueError(f"{name} has no sequence named blocks; it needs an Adapter")
    if any(kind.__module__.startswith("timm.") for kind in kinds):
        own = {x for kind in kinds if not kind.__module__.startswith("timm.") for x in vars(kind)}
        found = [x for x in DECIDING if x in own or x in vars(model)]
        if getattr(model, "global_pool", None) == "":
            found.append("way to pool (global_pool='')")
    else:  # the names are its own
        names = ("num_prefix_tokens", "blocks_token_only")
        is_told = adapter.num_prefix_tokens or any(hasattr(model, x) for x in names)
        found = [] if is_told or not has_class_token(model) else ["class token"]
    if found:
        must = "an Adapter must say num_prefix_tokens and reads_class_token"
        raise ValueError(f"{name} has its own {found[0]}: {must}")


def check_unwrapped(model: Any) -> None:
    """Raises ValueError if something else already holds the model."""
    kind = type(model).__name__
    for holds, reason in (
        (hasattr(model, "_orig_mod"), "is already compiled: attach first, then compile the module"),
        (isinstance(model, nn.DataParallel | DistributedDataParallel), "attach first, then wrap"),
        (is_sharded(model), "is sharded by fully_shard: attach first, then shard"),
        (hasattr(model, "scorenets"), "is already attached to"),
    ):
        if holds:
            raise ValueError(f"{kind}: {reason}")


def is_sharded(model: Any) -> bool:
    """Whether FSDP's `fully_shard` holds parameters of the model; imports nothing of it."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return any(kind.__name__ == "FSDPModule" for x in modules for kind in type(x).__mro__)
