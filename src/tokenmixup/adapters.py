"""Adapters: where a model keeps the modules that TokenMixup needs.

`adapter_of` has those of timm's models and of other known classes; `encoder.py` resolves them.
Letters: b batch, h heads, n tokens with prefix, d width, e head width, m memory.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokenmixup import hierarchical
from tokenmixup.attention import POSITIONAL, Parts, Projection
from tokenmixup.contexts import evaluating


def _itself(out: Any) -> Any:
    return out


def _flat(x: Tensor) -> Tensor:
    return x.flatten(1, -2)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Describes where a model keeps the modules that TokenMixup needs.

    Paths are dotted, such as `encoder.layers`; in `blocks`, `*` is every module of a sequence. HTM
    and VTM work with `parts`: attention over all tokens. The block must then call `attn` for
    self-attention without a mask, with the normed tokens as its first argument. HTM alone works
    with `saliency`, whatever the attention, or with neither and the gradient detector.
    """

    blocks: str  # path from the model to the sequence of blocks, such as `layers.*.blocks`
    embed_dim: str | int  # width of the tokens, or the path to it from the model or from `block`
    parts: Callable[[Any], Parts] | None = None  # of the attention, whenever they are needed
    norm: str | None = None  # path from a block to the layer norm before its attention
    attn: str | None = None  # path from a block to its attention module
    # The block and its arguments -> saliency `b t` of its input by its own attention, sum 1.
    saliency: Callable[..., Tensor] | None = None
    own_classes: bool = False  # whether block and attention must be of the model's Python module
    # A block's input -> tokens `b n d`, and back: tokens and the input -> one of its shape.
    tokens: tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]] = (
        _flat,
        torch.Tensor.view_as,
    )
    in_rows: bool = True  # whether spatial tokens are in the order of the image, row by row
    # Path from the model to the module whose output has a token for each patch: `b t d`,
    # `b rows columns d`, or of a convolution `b d rows columns`. By default `patch_embed` beside
    # the blocks, if there is one.
    patch_embed: str | None = None
    square_patches: bool = False  # whether their grid has the image's aspect ratio
    num_prefix_tokens: int = 0  # tokens before the spatial tokens
    reads_class_token: bool = False  # whether the head reads token 0 and no other token
    returns: Callable[[Tensor], Any] = _itself  # tokens -> the attention module's return value
    logits: Callable[[Any], Tensor] = _itself  # the model's return value -> logits `b c`
    arguments: tuple[str, ...] = ()  # further ones of the attention, of POSITIONAL's meaning

    def __post_init__(self) -> None:
        if self.parts is not None and (self.saliency or not (self.norm and self.attn)):
            raise ValueError("Adapter: parts needs norm and attn, and excludes saliency")


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
    home, name = class_path(attention)
    if name not in ("ViTAttention", "DeiTAttention", "Dinov2Attention") or package(home) != HF:
        raise ValueError(f"is a {name}, not one of transformers' own")
    if not torch.compiler.is_compiling():  # it has been looked at before
        _check_config(attention.config, type(attention).forward)
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


def _check_config(config: Any, forward: Any) -> None:
    """Raises ValueError if the model attends by a function of another's, or returns its maps."""
    if getattr(config, "output_attentions", False):
        raise ValueError("config.output_attentions=True: a block that TokenMixup touches has none")
    names, kind = getattr(forward, "__globals__", {}), config._attn_implementation
    functions = names.get("ALL_ATTENTION_FUNCTIONS", {})
    function = functions.get(kind, names.get("eager_attention_forward"))
    if package(getattr(function, "__globals__", {}).get("__name__", "")) != HF:
        raise ValueError(
            f"config._attn_implementation={kind!r}: its function is not transformers' own"
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


def _timm_stages(blocks: str, saliency: Callable[..., Tensor], in_rows: bool = True) -> Adapter:
    """Returns the adapter of a hierarchical model of timm."""
    return Adapter(
        blocks=blocks,
        embed_dim="block.attn.dim",
        attn="attn",
        saliency=saliency,
        own_classes=True,
        in_rows=in_rows,
        square_patches=True,
    )


BEFORE, HF = "layernorm_before", "transformers"
EMBEDDINGS = "embeddings.patch_embeddings.projection"
# by (module, class): models that work without an adapter of the user's
ADAPTERS = {
    ("torchvision.models.vision_transformer", "VisionTransformer"): multihead(
        "encoder.layers",
        "ln_1",
        "self_attention",
        embed_dim="hidden_dim",
        patch_embed="conv_proj",
        num_prefix_tokens=1,
        reads_class_token=True,
    ),
    ("transformers.models.vit.modeling_vit", "ViTForImageClassification"): _huggingface(
        "vit.layers",
        BEFORE,
        patch_embed=f"vit.{EMBEDDINGS}",
        num_prefix_tokens=1,
        reads_class_token=True,
    ),
    ("transformers.models.deit.modeling_deit", "DeiTForImageClassification"): _huggingface(
        "deit.layers",
        BEFORE,
        patch_embed=f"deit.{EMBEDDINGS}",
        num_prefix_tokens=2,
        reads_class_token=True,
    ),
    # its head reads the class token and the mean of the patches
    ("transformers.models.dinov2.modeling_dinov2", "Dinov2ForImageClassification"): _huggingface(
        "dinov2.encoder.layer", "norm1", patch_embed=f"dinov2.{EMBEDDINGS}", num_prefix_tokens=1
    ),
    ("timm.models.swin_transformer", "SwinTransformer"): _timm_stages(
        "layers.*.blocks", hierarchical.swin
    ),
    ("timm.models.swin_transformer_v2", "SwinTransformerV2"): _timm_stages(
        "layers.*.blocks", hierarchical.swin_v2
    ),
    ("timm.models.pvt_v2", "PyramidVisionTransformerV2"): _timm_stages(
        "stages.*.blocks", hierarchical.pvt_v2
    ),
    ("timm.models.hiera", "Hiera"): _timm_stages("blocks", hierarchical.hiera, in_rows=False),
}


def adapter_of(model: Any) -> Adapter:
    """Returns the adapter of a known model class; that of timm's names for any other class."""
    return ADAPTERS.get(class_path(model)) or timm_adapter(model)


def class_path(module: Any) -> tuple[str, str]:
    """Returns module and name of the class; of that before `fully_shard`, which makes a new one."""
    kind = next(kind for kind in type(module).__mro__ if not kind.__name__.startswith("FSDP"))
    return kind.__module__, kind.__name__


def package(path: str) -> str:
    """Returns the first name of a dotted path."""
    return path.partition(".")[0]


def timm_adapter(model: Any) -> Adapter:
    """Returns the adapter of a model with timm's names."""
    joins_later = hasattr(model, "blocks_token_only")  # CaiT's class token has blocks of its own
    prefix = 0 if joins_later else getattr(model, "num_prefix_tokens", 0)
    pools_token = getattr(model, "global_pool", None) == "token"
    return Adapter(
        blocks="blocks",
        norm="norm1",
        attn="attn",
        parts=timm_parts,
        embed_dim="embed_dim",
        arguments=POSITIONAL,
        square_patches=True,
        num_prefix_tokens=prefix,
        reads_class_token=pools_token and prefix > 0 and has_class_token(model),
    )


def has_class_token(model: nn.Module) -> bool:
    """Whether the model or its embedding has a parameter `cls_token`."""
    return any(name.rpartition(".")[2] == "cls_token" for name, _ in model.named_parameters())


def timm_parts(attn: Any) -> Parts:
    """Returns the Parts of an attention with timm's names, which may lack all but the first."""
    gate = getattr(attn, "gate", None)
    before, after = (getattr(attn, name, None) for name in ("proj_l", "proj_w"))
    qkv: Any = getattr(attn, "qkv", None)
    q_proj, k_proj, v_proj = (getattr(attn, f"{part}_proj", None) for part in "qkv")
    return Parts(
        num_heads=attn.num_heads,
        scale=attn.scale,
        training=attn.training,
        dropout=attn.attn_drop.p,
        qkv=qkv if getattr(attn, "q_bias", None) is None else _WithBiases(qkv, attn),
        q_proj=q_proj,
        k_proj=k_proj,
        v_proj=v_proj,
        q_norm=_norm(attn, "q_norm"),
        k_norm=_norm(attn, "k_norm"),
        num_kv_groups=getattr(attn, "num_kv_groups", 1),
        rotate_half=getattr(attn, "rotate_half", False),
        bias=partial(_own_bias, attn) if _has_bias(attn) else None,
        mix_scores=None if before is None else partial(_mix_heads, before),
        mixing_dtype=None if before is None else before.weight.dtype,
        mix_weights=None if after is None else partial(_mix_heads, after),
        norm=_norm(attn, "norm"),
        gate=(lambda x: gate(x).sigmoid()) if isinstance(gate, nn.Module) else None,
        proj=lambda x: attn.proj_drop(attn.proj(x)),
        fused=getattr(attn, "fused_attn", True) and after is None,
    )


def _norm(attn: Any, name: str) -> nn.Module | None:
    norm = getattr(attn, name, None)
    return None if isinstance(norm, nn.Identity) or not isinstance(norm, nn.Module) else norm


class _WithBiases(NamedTuple):
    """A fused projection without a bias, and the module that has those of q, k and v: BEiT, EVA."""

    layer: nn.Linear
    attn: Any

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    @property
    def bias(self) -> Tensor:
        return torch.cat([self.attn.q_bias, self.attn.k_bias, self.attn.v_bias])


def _mix_heads(mix: nn.Module, x: Tensor) -> Tensor:
    """Mixes heads linearly (talking-heads attention, Shazeer et al., 2020)."""
    return mix(x.movedim(1, -1)).movedim(-1, 1)


def _has_bias(attn: Any) -> bool:
    table, own = (getattr(attn, name, None) for name in ("relative_position_bias_table", "rel_pos"))
    return table is not None or own is not None


def _own_bias(attn: Any, dropout: bool) -> Tensor:
    """Returns the relative position bias of an attention that has one, `1 h n n`."""
    if getattr(attn, "relative_position_bias_table", None) is not None:
        return attn._get_rel_pos_bias()
    with nullcontext() if dropout else evaluating(attn.rel_pos):
        return attn.rel_pos.get_bias()
