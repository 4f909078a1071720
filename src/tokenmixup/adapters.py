"""Adapters for models whose modules are not named as in timm.

`attach(model, ..., adapter=...)` works on an `Adapted` view of the model, which has the attribute
names that the rest of the library reads. ADAPTERS holds the adapters of known model classes.
Letters: b batch, h heads, n tokens with prefix, d width, e head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

OF_WEIGHTS = ("need_weights", "average_attn_weights")  # arguments without effect on the tokens


def _itself(out: Any) -> Any:
    return out


class Dropped(NamedTuple):
    """The attribute of a dropout layer that the library reads."""

    p: float


class Projection(NamedTuple):
    """The parameters of a linear layer that is no module of its own."""

    weight: Tensor
    bias: Tensor | None


@dataclass(kw_only=True)
class Parts:
    """The parts of an attention module: softmax(scale q k^T) v per head, followed by `proj`.

    Queries, keys and values are computed by `qkv`, a single layer whose weight holds the rows of
    queries, keys and values in this order; by `q_proj`, `k_proj` and `v_proj`; or by `project`, a
    function from normed tokens `b n d` to three tensors `b h n e` that treats tokens independently.
    """

    num_heads: int
    proj: Callable[[Tensor], Tensor]  # b n (h e) -> b n d, including the module's output dropout
    training: bool  # of the module: whether attention dropout is active
    dropout: float = 0.0
    scale: float | None = None  # None: 1 / sqrt(e)
    qkv: Any = None  # a Linear, or an object with weight and bias
    q_proj: nn.Linear | None = None
    k_proj: nn.Linear | None = None
    v_proj: nn.Linear | None = None
    project: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None = None

    def __post_init__(self) -> None:
        separate = [self.q_proj, self.k_proj, self.v_proj]
        ways = [self.qkv is not None, None not in separate, self.project is not None]
        if sum(ways) != 1 or (None in separate) != (separate == [None] * 3):
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

    proj_drop = staticmethod(_itself)  # part of `proj`


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Describes where a model with pre-norm attention keeps the modules that TokenMixup needs.

    Paths are dotted, such as `encoder.layers`. The block must call `attn` for self-attention
    without a mask, with the normed tokens as its first argument. `parts` is called with that module
    whenever its Parts are needed.
    """

    blocks: str  # path from the model to the sequence of blocks
    norm: str  # path from a block to the layer norm before its attention
    attn: str  # path from a block to its attention module
    parts: Callable[[Any], Parts]
    embed_dim: str | int  # width of the tokens, or the path from the model to it
    num_prefix_tokens: int = 0  # tokens before the spatial tokens
    reads_class_token: bool = False  # whether the head reads token 0 and no other token
    returns: Callable[[Tensor], Any] = _itself  # tokens -> the attention module's return value
    logits: Callable[[Any], Tensor] = _itself  # the model's return value -> logits `b c`


class Adapted:
    """View of a model with timm's attribute names.

    Raises ValueError if a path of the adapter does not exist.
    """

    def __init__(self, model: nn.Module, adapter: Adapter):
        self.model, self.adapter = model, adapter
        blocks = found(model, adapter, "blocks")
        if not isinstance(blocks, nn.Sequential | nn.ModuleList) or not len(blocks):
            kind = f"is {type(blocks).__name__}, needs a Sequential or ModuleList of blocks"
            raise ValueError(f"Adapter.blocks={adapter.blocks!r}: {kind}")
        if len({id(block) for block in blocks}) < len(blocks):
            raise ValueError(f"Adapter.blocks={adapter.blocks!r}: holds one block more than once")
        self.blocks = [AdaptedBlock(block, adapter) for block in blocks]
        width = adapter.embed_dim
        self.embed_dim = width if isinstance(width, int) else found(model, adapter, "embed_dim")
        self.num_prefix_tokens = adapter.num_prefix_tokens
        self.global_pool = "token" if adapter.reads_class_token else "avg"
        self.has_class_token = adapter.reads_class_token


class AdaptedBlock:
    """View of a block with timm's attribute names, `norm1` and `attn`; the latter is a Parts."""

    def __init__(self, module: Any, adapter: Adapter):
        self.module, self.adapter = module, adapter
        self.attention: Any = found(module, adapter, "attn")
        self.norm1: Any = found(module, adapter, "norm")
        if self.norm1 is self.attention:
            raise ValueError(f"Adapter.norm={adapter.norm!r}: is the attention")

    @property
    def attn(self) -> Parts:
        try:
            parts = self.adapter.parts(self.attention)
        except (AttributeError, ValueError) as error:  # such as of another module
            raise ValueError(f"Adapter.parts of {self.adapter.attn}: {error}") from error
        if not isinstance(parts, Parts):
            raise ValueError(f"Adapter.parts: returned a {type(parts).__name__}, must be Parts")
        return parts


def found(start: Any, adapter: Adapter, field: str) -> Any:
    """Returns what a path of the adapter leads to. Raises ValueError if the path is wrong."""
    path, part = getattr(adapter, field), start
    for name in str(path).split("."):
        if not hasattr(part, name):
            modules = ", ".join(dict(part.named_children())) if isinstance(part, nn.Module) else ""
            has = f", its modules are {modules}" if modules else ""
            raise ValueError(
                f"Adapter.{field}={path!r}: {type(part).__name__} has no {name!r}{has}"
            )
        part = getattr(part, name)
    if field in ("norm", "attn") and not isinstance(part, nn.Module):
        raise ValueError(f"Adapter.{field}={path!r}: is {type(part).__name__}, needs a module")
    return part


def block_module(block: Any) -> Any:
    """Returns the block's module, also for a view."""
    return block.module if isinstance(block, AdaptedBlock) else block


def attention_module(block: Any) -> Any:
    """Returns the attention module of a block, also for a view."""
    return block.attention if isinstance(block, AdaptedBlock) else block.attn


def as_called(block: Any, attend: Callable[..., Tensor]) -> Callable[..., Any]:
    """Gives `attend`, a function of tokens `b n d`, the call signature of the block's attention."""
    return partial(_call, block.adapter, attend) if isinstance(block, AdaptedBlock) else attend


def _call(adapter: Adapter, attend: Callable[..., Tensor], *called: Any, **given: Any) -> Any:
    if not called:
        raise ValueError("an attention gets its tokens by keyword: must be its first argument")
    tokens, *others = called
    kept = {name: value for name, value in given.items() if name not in OF_WEIGHTS}
    for name, value in (*enumerate(others, start=1), *kept.items()):
        if not (value is None or value is False or value is tokens):
            raise ValueError(
                f"TokenMixup supports only self-attention without a mask; argument {name} of the "
                "attention, such as a mask or positions, is not understood"
            )
    return adapter.returns(attend(tokens))


def multihead_parts(attention: nn.MultiheadAttention) -> Parts:
    """Returns the Parts of torch's MultiheadAttention, batch-first and with one projection."""
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
    """Returns the Parts of the attention of ViT, DeiT and DINOv2 in transformers >= 5.18."""
    if type(attention).__name__ not in ("ViTAttention", "DeiTAttention", "Dinov2Attention"):
        raise ValueError(f"is a {type(attention).__name__}, not one of transformers' own")
    if not hasattr(attention, "o_proj"):
        raise ValueError(f"{type(attention).__name__} has no o_proj: needs transformers >= 5.18")
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
    """Returns the adapter of blocks around torch's MultiheadAttention."""
    parts: dict[str, Any] = {"parts": multihead_parts, "returns": _with_weights}
    return Adapter(blocks=blocks, norm=norm, attn=attn, **{**parts, **more})


def torch_encoder(encoder: str, embed_dim: str | int, **more: Any) -> Adapter:
    """Returns the adapter of a model that contains an nn.TransformerEncoder at the path `encoder`.

    Its layers must be `norm_first` and `batch_first`. `more`: further fields of Adapter.
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
# by (module, class): models that work without an adapter of the user's
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
    # its head reads the class token and the mean of the patches
    ("transformers.models.dinov2.modeling_dinov2", "Dinov2ForImageClassification"): _huggingface(
        "dinov2.encoder.layer", "norm1", num_prefix_tokens=1
    ),
}


def adapter_of(model: nn.Module) -> Adapter | None:
    """Returns the adapter of a known model class, None for models with timm's names."""
    return ADAPTERS.get((type(model).__module__, type(model).__name__))
