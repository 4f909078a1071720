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

from tokenmixup.attention import AttentionMap


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Describes where a model keeps its blocks, and what their tokens are.

    Paths are dotted, such as `encoder.layers`; in `blocks`, `*` is every module of a sequence. A
    block gets its tokens first, `b n d` or a grid `b rows columns d`, and returns them first. HTM
    and VTM work with blocks that compute one softmax over all of their tokens. HTM alone also works
    with maps of windows or of fewer keys (`geometry`), and without a map by a detector of one's
    own. Raises ValueError if the class token is read, but there is no prefix.
    """

    blocks: str  # path from the model to the sequence of blocks, such as `layers.*.blocks`
    embed_dim: str | int  # width of the tokens, or the path to it from the model or from `block`
    num_prefix_tokens: int = 0  # tokens before the spatial tokens
    reads_class_token: bool = False  # whether the head reads token 0 and no patch
    # whether spatial tokens are square patches of the image, row by row; else they are not counted
    in_rows: bool = True
    # (block, map, *args, **kwargs of the block) -> saliency `b t` of its input; any shape of map
    geometry: Callable[..., Tensor] | None = None

    def __post_init__(self) -> None:
        if self.reads_class_token and not self.num_prefix_tokens:
            raise ValueError("Adapter.reads_class_token=True: needs num_prefix_tokens >= 1")

    @property
    def attends_to_all(self) -> bool:
        """Whether each block computes a softmax over all of its tokens."""
        return self.geometry is None


def swin(block: Any, seen: AttentionMap, x: Tensor) -> Tensor:
    """Saliency of a block of Swin or Swin-V2, `b rows columns d`: attention over shifted windows.

    Windows that overlap the edge are padded; the share of the padding is lost.
    """
    rows, columns = x.shape[1:3]
    i, j = block.window_size
    down = math.ceil(rows / i)
    across = math.ceil(columns / j)
    received = seen.received()  # (b y x) (i j): windows, and the tokens of one
    grid = rearrange(received, "(b y x) (i j) -> b (y i) (x j)", y=down, x=across, i=i)
    return torch.roll(grid[:, :rows, :columns], tuple(block.shift_size), dims=(1, 2)).flatten(1)


def pvt_v2(block: Any, seen: AttentionMap, x: Tensor, size: tuple[int, int]) -> Tensor:
    """Saliency of a block of PVT-v2, `b t d` in the grid `size`: that of fewer keys, resized."""
    received = seen.received()  # b m
    height, width = size if block.attn.pool is None else (1, 1)  # else keys are of a square grid
    rows = round(math.sqrt(received.shape[1] * height / width))
    grid = received.unflatten(1, (rows, -1))[:, None]  # b 1 rows columns
    return F.interpolate(grid, tuple(size), mode="nearest").flatten(1)


def hiera(block: Any, seen: AttentionMap, x: Tensor) -> Tensor:
    """Saliency of a block of Hiera, `b t d` in its own order: by mask units, or over all tokens."""
    received = seen.received()
    if received.ndim == 2:
        return received
    return rearrange(received, "b w n -> b (n w)")


def _stages(blocks: str, geometry: Callable[..., Tensor], in_rows: bool = True) -> Adapter:
    """Returns the adapter of one of timm's models whose stages have other widths."""
    return Adapter(
        blocks=blocks,
        embed_dim="block.attn.dim",
        in_rows=in_rows,
        geometry=geometry,
    )


def _huggingface(
    name: str, blocks: str, num_prefix_tokens: int, reads_class_token: bool = True
) -> Adapter:
    """Returns the adapter of a model of transformers; `name`: of its backbone."""
    return Adapter(
        blocks=f"{name}.{blocks}",
        embed_dim="config.hidden_size",
        num_prefix_tokens=num_prefix_tokens,
        reads_class_token=reads_class_token,
    )


HF = "transformers.models"
TIMM = "timm.models"
ADAPTERS = {  # models that work without an adapter of the user's
    "torchvision.models.vision_transformer.VisionTransformer": Adapter(
        blocks="encoder.layers",
        embed_dim="hidden_dim",
        num_prefix_tokens=1,
        reads_class_token=True,
    ),
    f"{HF}.vit.modeling_vit.ViTForImageClassification": _huggingface("vit", "layers", 1),
    f"{HF}.deit.modeling_deit.DeiTForImageClassification": _huggingface("deit", "layers", 2),
    # its head reads the class token and the mean of the patches
    f"{HF}.dinov2.modeling_dinov2.Dinov2ForImageClassification": _huggingface(
        "dinov2", "encoder.layer", 1, reads_class_token=False
    ),
    f"{TIMM}.swin_transformer.SwinTransformer": _stages("layers.*.blocks", swin),
    f"{TIMM}.swin_transformer_v2.SwinTransformerV2": _stages("layers.*.blocks", swin),
    f"{TIMM}.pvt_v2.PyramidVisionTransformerV2": _stages("stages.*.blocks", pvt_v2),
    f"{TIMM}.hiera.Hiera": _stages("blocks", hiera, in_rows=False),
}


def adapter_of(model: Any) -> Adapter:
    """Returns the adapter of a known class, or one made from it; else that of timm's names.

    Raises ValueError if an adapter of the user's must say where the blocks are, or which of their
    tokens are the prefix.
    """
    for base in type(model).__mro__:
        known = ADAPTERS.get(f"{base.__module__}.{base.__name__}")
        if known is not None:
            return known
    name = type(model).__name__
    if not hasattr(model, "blocks"):
        raise ValueError(f"{name} has no sequence named blocks; it needs an Adapter")
    joins_later = hasattr(model, "blocks_token_only")  # CaiT's class token has blocks of its own
    names_prefix = hasattr(model, "num_prefix_tokens") or joins_later
    if not names_prefix and has_class_token(model):
        must = "an Adapter must say num_prefix_tokens and reads_class_token"
        raise ValueError(f"{name} has a class token: {must}")
    num_prefix_tokens = 0 if joins_later else getattr(model, "num_prefix_tokens", 0)
    pools_token = getattr(model, "global_pool", None) == "token"
    return Adapter(
        blocks="blocks",
        embed_dim="embed_dim",
        num_prefix_tokens=num_prefix_tokens,
        reads_class_token=pools_token and num_prefix_tokens > 0 and has_class_token(model),
    )


def has_class_token(model: nn.Module) -> bool:
    """Whether the model or its embedding has a parameter `cls_token`."""
    return any(name.rpartition(".")[2] == "cls_token" for name, _ in model.named_parameters())


def blocks_of(model: Any, adapter: Adapter | None = None) -> list[nn.Module]:
    """Returns the blocks of a transformer, over all stages.

    Raises ValueError with the one-line reason if it is not said where they are, or which of their
    tokens are the prefix; AttributeError if an adapter's path is wrong.
    """
    if adapter is None:
        adapter = adapter_of(model)
    modules = [model]
    for path in adapter.blocks.split(".*."):
        modules = [block for module in modules for block in attrgetter(path)(module)]
    return modules


def width_of(model: Any, block: nn.Module, adapter: Adapter) -> int:
    """Returns the width of the tokens that enter a block."""
    path = adapter.embed_dim
    if not isinstance(path, str):
        return path
    start: Any = model
    if path.startswith("block."):
        start = block
        path = path.removeprefix("block.")
    width: int = attrgetter(path)(start)
    return width
