"""Models whose parts have other names than timm's: an Adapter says where they are.

`attach(model, ..., adapter=...)` then works on an `Adapted` view of the model, whose blocks have
the names that all of this library reads. ADAPTERS holds classes that need no adapter of the user's.
Letters: b batch, h heads, n tokens with prefix, d width, e head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

from torch import Tensor, nn

OF_WEIGHTS = ("need_weights", "average_attn_weights")  # arguments that change no token


def _itself(out: Any) -> Any:
    return out


class Dropped(NamedTuple):
    """What is read of a dropout."""

    p: float


class Projection(NamedTuple):
    """A layer that is not a module of its own."""

    weight: Tensor
    bias: Tensor | None


@dataclass(kw_only=True)
class Parts:
    """What an attention module is made of: softmax(scale q k^T) v, by heads, and then `proj`.

    Queries, keys and values come from `qkv`, one layer whose rows are all queries, then all keys,
    then all values; from `q_proj`, `k_proj` and `v_proj`; or from `project`, a function of normed
    tokens `b n d` that returns three of `b h n e`. It has to treat each token alone.
    """

    num_heads: int
    proj: Callable[[Tensor], Tensor]  # b n (h e) -> b n d, the module's own dropout included
    training: bool  # of the module: whether `dropout` of the map is on
    dropout: float = 0.0
    scale: float | None = None  # None: 1 / sqrt(e)
    qkv: Any = None  # a Linear, or what has its weight and bias
    q_proj: nn.Linear | None = None
    k_proj: nn.Linear | None = None
    v_proj: nn.Linear | None = None
    project: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None = None

    def __post_init__(self) -> None:
        separate = [self.q_proj, self.k_proj, self.v_proj]
        told = [self.qkv is not None, None not in separate, self.project is not None]
        if sum(told) != 1 or (None in separate) != (separate == [None] * 3):
            raise ValueError("Parts: give either qkv, or q_proj, k_proj and v_proj, or project")
        if isinstance(self.scale, Tensor):
            raise ValueError("Parts: scale must be a number, not a tensor")
        if self.scale is None:
            if self.project is not None:
                raise ValueError("Parts: scale must be given with project")
            layer, layers = (self.qkv, 3) if self.q_proj is None else (self.q_proj, 1)
            width = len(layer.weight) // layers
            if width % self.num_heads:
                raise ValueError(f"Parts: num_heads={self.num_heads} must divide the width {width}")
            self.scale = (width / self.num_heads) ** -0.5

    @property
    def attn_drop(self) -> Dropped:
        return Dropped(self.dropout)

    proj_drop = staticmethod(_itself)  # `proj` has it


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Where a model of pre-norm attention keeps what TokenMixup needs.

    Paths are dotted, such as `encoder.layers`. `attn` must be called with the normed tokens first,
    for self-attention without a mask. `parts` makes Parts of that module whenever it is asked.
    """

    blocks: str  # from the model: the sequence of blocks
    norm: str  # from a block: what normalises the input of its attention
    attn: str  # from a block: the attention module
    parts: Callable[[Any], Parts]
    embed_dim: str | int  # from the model: the width of its tokens, or the number itself
    num_prefix_tokens: int = 0  # in front of the spatial tokens
    reads_class_token: bool = False  # whether the class is read from token 0 and no other
    returns: Callable[[Tensor], Any] = _itself  # what the attention module returns
    logits: Callable[[Any], Tensor] = _itself  # of what the model returns, `b c`


class Adapted:
    """A model by the names that this library reads, which are timm's.

    Raises ValueError where a path of the adapter leads nowhere.
    """

    def __init__(self, model: nn.Module, adapter: Adapter):
        self.model, self.adapter = model, adapter
        blocks = found(model, adapter.blocks)
        if not isinstance(blocks, nn.Sequential | nn.ModuleList) or not len(blocks):
            kind = f"is {type(blocks).__name__}, needs a Sequential or ModuleList of blocks"
            raise ValueError(f"Adapter.blocks={adapter.blocks!r}: {kind}")
        if len({id(block) for block in blocks}) < len(blocks):
            raise ValueError(f"Adapter.blocks={adapter.blocks!r}: holds one block more than once")
        self.blocks = [AdaptedBlock(block, adapter) for block in blocks]
        width = adapter.embed_dim
        self.embed_dim = width if isinstance(width, int) else found(model, width)
        self.num_prefix_tokens = adapter.num_prefix_tokens
        self.global_pool = "token" if adapter.reads_class_token else "avg"
        self.has_class_token = adapter.reads_class_token


class AdaptedBlock:
    """A block by the same names: `norm1` and `attn`, which is made of Parts."""

    def __init__(self, module: Any, adapter: Adapter):
        self.module, self.adapter = module, adapter
        self.attention: Any = found(module, adapter.attn)
        self.norm1: Any = found(module, adapter.norm)
        if self.norm1 is self.attention:
            raise ValueError(f"Adapter.norm={adapter.norm!r}: is the attention")

    @property
    def attn(self) -> Parts:
        parts = self.adapter.parts(self.attention)
        if not isinstance(parts, Parts):
            raise ValueError(f"Adapter.parts: has returned a {type(parts).__name__}, must be Parts")
        return parts


def found(start: Any, path: str) -> Any:
    """What a dotted path leads to; ValueError if nothing."""
    try:
        return reduce(getattr, path.split("."), start)
    except AttributeError as error:
        raise ValueError(f"Adapter: {type(start).__name__} has no {path} ({error})") from error


def block_module(block: Any) -> Any:
    """The block itself, of a view or as it is."""
    return block.module if isinstance(block, AdaptedBlock) else block


def attention_module(block: Any) -> Any:
    """The attention that a block calls."""
    return block.attention if isinstance(block, AdaptedBlock) else block.attn


def as_called(block: Any, attend: Callable[..., Tensor]) -> Callable[..., Any]:
    """`attend`, a function of tokens `b n d`, by the calls of the block's attention module."""
    return partial(_call, block.adapter, attend) if isinstance(block, AdaptedBlock) else attend


def _call(adapter: Adapter, attend: Callable[..., Tensor], *called: Any, **given: Any) -> Any:
    if not called:
        raise ValueError("an attention gets its tokens by name: must be its first argument")
    tokens, *others = called
    kept = {name: value for name, value in given.items() if name not in OF_WEIGHTS}
    for name, value in (*enumerate(others, start=1), *kept.items()):
        if not (value is None or value is False or value is tokens):
            raise ValueError(
                f"TokenMixup serves self-attention of tokens alone; argument {name} of the "
                "attention, such as a mask or positions, is not understood"
            )
    return adapter.returns(attend(tokens))


def multihead_parts(attention: nn.MultiheadAttention) -> Parts:
    """Of torch's module, with batches first and one projection."""
    if type(attention) is not nn.MultiheadAttention:
        raise ValueError(f"is a {type(attention).__name__}, not torch's own MultiheadAttention")
    if not attention.batch_first or attention.in_proj_weight is None:
        raise ValueError("MultiheadAttention must have batch_first=True and one width for q, k, v")
    if attention.bias_k is not None or attention.add_zero_attn:
        raise ValueError("MultiheadAttention must have neither add_bias_kv nor add_zero_attn")
    return Parts(
        num_heads=attention.num_heads,
        qkv=Projection(attention.in_proj_weight, attention.in_proj_bias),
        proj=attention.out_proj,
        dropout=attention.dropout,
        training=attention.training,
    )


def huggingface_parts(attention: Any) -> Parts:
    """Of the attention of ViT, DeiT and DINOv2 in transformers 5, from 5.18 on."""
    if type(attention).__name__ not in ("ViTAttention", "DeiTAttention", "Dinov2Attention"):
        raise ValueError(f"is a {type(attention).__name__}, not one of transformers' own")
    if not hasattr(attention, "o_proj"):
        raise ValueError(f"{type(attention).__name__} has no o_proj, transformers has since 5.18")
    return Parts(
        num_heads=attention.num_attention_heads,
        scale=attention.scaling,
        q_proj=attention.q_proj,
        k_proj=attention.k_proj,
        v_proj=attention.v_proj,
        proj=attention.o_proj,
        dropout=attention.attention_dropout,
        training=attention.training,
    )


def _with_weights(out: Tensor) -> tuple[Tensor, None]:
    return out, None


def _logits(out: Any) -> Tensor:
    return out.logits


def multihead(blocks: str, norm: str, attn: str, **more: Any) -> Adapter:
    """Blocks around torch's MultiheadAttention, such as those of nn.TransformerEncoder."""
    parts: dict[str, Any] = {"parts": multihead_parts, "returns": _with_weights}
    return Adapter(blocks=blocks, norm=norm, attn=attn, **{**parts, **more})


def torch_encoder(encoder: str, embed_dim: str | int, **more: Any) -> Adapter:
    """A model whose blocks are those of an nn.TransformerEncoder, `norm_first` and `batch_first`.

    `encoder`: the path to it.
    """
    return multihead(f"{encoder}.layers", "norm1", "self_attn", embed_dim=embed_dim, **more)


def _huggingface(blocks: str, norm: str, **more: Any) -> Adapter:
    return Adapter(
        blocks=blocks,
        norm=norm,
        attn="attention",
        parts=huggingface_parts,
        embed_dim="config.hidden_size",
        returns=_with_weights,
        logits=_logits,
        **more,
    )


BEFORE = "layernorm_before"
# (module, class) of what needs no adapter of the user's.
ADAPTERS = {
    ("torchvision.models.vision_transformer", "VisionTransformer"): multihead(
        "encoder.layers",
        "ln_1",
        "self_attention",
        embed_dim="hidden_dim",
        num_prefix_tokens=1,
        reads_class_token=True,
    ),
    ("transformers.models.vit.modeling_vit", "ViTForImageClassification"): _huggingface(
        "vit.layers", BEFORE, num_prefix_tokens=1, reads_class_token=True
    ),
    ("transformers.models.deit.modeling_deit", "DeiTForImageClassification"): _huggingface(
        "deit.layers", BEFORE, num_prefix_tokens=2, reads_class_token=True
    ),
    # its class is read from the class token and the mean of the patches
    ("transformers.models.dinov2.modeling_dinov2", "Dinov2ForImageClassification"): _huggingface(
        "dinov2.encoder.layer", "norm1", num_prefix_tokens=1
    ),
}


def adapter_of(model: nn.Module) -> Adapter | None:
    """The adapter that the model's class has here; None for timm's and others with its names."""
    return ADAPTERS.get((type(model).__module__, type(model).__name__))
