"""The weights of a stock attention module, used on other queries, keys and values.

The module is timm's `Attention` or one with the same parts: `qkv` (fused projection), `num_heads`,
`scale`, `attn_drop`, `proj`, `proj_drop`, and optionally `q_norm`, `k_norm`, `norm`, `gate`.
Letters: b batch, h heads, n tokens with prefix, d width, e head width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

TIMM_MODULES = ("timm.layers.attention", "timm.models.vision_transformer")
PARTS = ("qkv", "num_heads", "scale", "attn_drop", "proj", "proj_drop")


def is_plain_attention(attn: Any) -> bool:
    """Whether it is timm's own: softmax(q k^T) v without rotary, relative or other terms."""
    kind = type(attn)
    is_timms = kind.__module__ in TIMM_MODULES and kind.__name__ == "Attention"
    return is_timms and all(hasattr(attn, part) for part in PARTS)


def project(attn: Any, x: Tensor, parts: str = "qkv") -> list[Tensor]:
    """Projects `b n d` to the asked neighbours among q, k and v, each `b h n e`."""
    width = attn.qkv.out_features // 3
    rows = slice(width * "qkv".index(parts[0]), width * ("qkv".index(parts[-1]) + 1))
    bias = None if attn.qkv.bias is None else attn.qkv.bias[rows]
    out = F.linear(x, attn.qkv.weight[rows], bias)
    heads = rearrange(out, "b n (p h e) -> p b h n e", p=len(parts), h=attn.num_heads).unbind()
    norms = {"q": getattr(attn, "q_norm", None), "k": getattr(attn, "k_norm", None)}
    return [
        head if (norm := norms.get(part)) is None else norm(head)
        for part, head in zip(parts, heads, strict=True)
    ]


def attention_map(attn: Any, x: Tensor, first_row_only: bool = False) -> Tensor:
    """The map after softmax that `attn` computes on `x`, in float32 and without dropout.

    `b n d` -> `b h n n`, or `b h 1 n` for the first token's query alone.
    """
    if first_row_only:
        (q,), (k,) = project(attn, x[:, :1], "q"), project(attn, x, "k")
    else:
        q, k = project(attn, x, "qk")
    return ((q * attn.scale) @ k.mT).softmax(dim=-1, dtype=torch.float32)


def attend(attn: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of `q` to `k` and `v`, then the rest of `attn`; `x` are the queries' tokens."""
    dropout = attn.attn_drop.p if attn.training else 0.0
    if getattr(attn, "fused_attn", True):
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=attn.scale)
    else:
        out = F.dropout(((q * attn.scale) @ k.mT).softmax(dim=-1), dropout) @ v
    out = rearrange(out, "b h n e -> b n (h e)")
    if isinstance(norm := getattr(attn, "norm", None), nn.Module):
        out = norm(out)
    if isinstance(gate := getattr(attn, "gate", None), nn.Module):
        out = out * gate(x).sigmoid()
    return attn.proj_drop(attn.proj(out))
