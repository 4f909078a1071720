"""Applies the weights of a stock attention module to other queries, keys and values.

The module is timm's, or has the same attributes: `num_heads`, `scale`, `attn_drop`, `proj`,
`proj_drop`; a fused `qkv` projection or `q_proj`, `k_proj`, `v_proj`; optionally `q_bias`,
`k_bias`, `v_bias`, `q_norm`, `k_norm`, `norm`, `gate`, grouped keys, rotary positions, a bias per
pair of tokens, and talking heads.

Letters: b batch, h heads, n tokens with prefix, m memory, d width, e head width.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from tokenmixup.contexts import evaluating, without_autocast

CACHED_SCORES = 2**17  # attention scores per core and chunk: half a MiB
KNOWN_ARGUMENTS = ("rope", "attn_mask", "shared_rel_pos", "shared_rel_pos_bias")


class Positions(NamedTuple):
    """Positional terms of an attention module; None if it has no such term."""

    rope: Tensor | None = None  # b|1 h|1 n 2e: sines, then cosines, of every token's angle
    bias: Tensor | None = None  # b|1 h|1 n|1 n, added to the scaled scores, query x key

    def of_memory(self, indices: Sequence[Tensor]) -> "Positions":
        """Appends the terms of a memory of tokens with these indices, each `b kappa` in 0..n-1."""
        rope, bias = self
        if rope is None and bias is None:
            return self
        index = torch.cat(list(indices), dim=1)  # b m
        if rope is not None:
            rope = rope.expand(len(index), -1, -1, -1)
            rope = torch.cat([rope, rope.take_along_dim(index[:, None, :, None], dim=2)], dim=2)
        if bias is not None:
            bias = bias.expand(len(index), -1, -1, -1)
            bias = torch.cat([bias, bias.take_along_dim(index[:, None, None], dim=3)], dim=3)
        return Positions(rope, bias)


def positions(attn: Any, n: int, given: Mapping[str, Any], dropout: bool = True) -> Positions:
    """Returns the positional terms of `n` tokens.

    `given`: the further arguments that the block passes to `attn`. `dropout`: whether dropout is
    active in an MLP of `attn` that computes its bias (a bias shared by all blocks includes its
    dropout). Raises ValueError for an unknown argument, such as a causal mask.
    """
    unknown = [
        name
        for name, value in given.items()
        if name not in KNOWN_ARGUMENTS and value is not None and value is not False
    ]
    if unknown:
        raise ValueError(f"TokenMixup does not support the argument {unknown[0]} of a block")
    own = _own_bias(attn, dropout)
    biases = [given.get("shared_rel_pos"), given.get("shared_rel_pos_bias"), own]
    mask = given.get("attn_mask")
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
    present = [bias for bias in (*biases, mask) if bias is not None]
    bias = sum(present[1:], start=present[0]) if present else None
    return Positions(_rope_of_all(given.get("rope"), n), None if bias is None else _to_4d(bias))


def _own_bias(attn: Any, dropout: bool) -> Tensor | None:
    """Returns the module's own relative position bias, `1 h n n`, if it has one."""
    if getattr(attn, "relative_position_bias_table", None) is not None:
        return attn._get_rel_pos_bias()
    own = getattr(attn, "rel_pos", None)
    if own is None:
        return None
    with nullcontext() if dropout else evaluating(own):
        return own.get_bias()


def _rope_of_all(rope: Tensor | None, n: int) -> Tensor | None:
    """Extends rotary positions to all `n` tokens; the prefix is not rotated."""
    if rope is None:
        return None
    rope = _to_4d(rope)  # b|1 h|1 t 2e
    identity = rope.new_zeros(*rope.shape[:2], n - rope.shape[2], rope.shape[3])
    identity.chunk(2, dim=-1)[1].fill_(1)  # sine 0, cosine 1
    return torch.cat([identity, rope], dim=2)


def _to_4d(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.ndim)]


def project(
    attn: Any, x: Tensor, rope: Tensor | None = None, known: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Projects `b n d` to q, k and v, each `b h n e`.

    `rope`: as in Positions. `known`: the `projections` of `x`, if already computed.
    """
    if (own := getattr(attn, "project", None)) is not None:
        return list(own(x))
    flat = known or projections(attn, x)
    if len(flat) == 1:
        flat = flat[0].chunk(3, dim=-1)
    return [_heads(attn, part, y, rope) for part, y in zip("qkv", flat, strict=True)]


def projections(attn: Any, x: Tensor) -> list[Tensor]:
    """Returns the projections of `b n d`: one tensor with q, k and v side by side, or three.

    Empty if the module projects by a custom function, `Parts.project`.
    """
    if getattr(attn, "project", None) is not None:
        return []
    return [F.linear(x, weight, bias) for weight, bias in _projection_layers(attn)]


def _projection_layers(attn: Any) -> list[tuple[Tensor, Tensor | None]]:
    """Returns weight and bias of each projection layer."""
    if getattr(attn, "qkv", None) is None:
        layers = [getattr(attn, f"{part}_proj") for part in "qkv"]
        return [(layer.weight, layer.bias) for layer in layers]
    bias = attn.qkv.bias
    if getattr(attn, "q_bias", None) is not None:  # BEiT and EVA: the bias of keys is a constant 0
        bias = torch.cat([getattr(attn, f"{part}_bias") for part in "qkv"])
    return [(attn.qkv.weight, bias)]


def _heads(attn: Any, part: str, x: Tensor, rope: Tensor | None) -> Tensor:
    """Splits `b n (h e)` into heads, normalises and rotates q and k, repeats grouped k and v."""
    groups = 1 if part == "q" else getattr(attn, "num_kv_groups", 1)
    y = rearrange(x, "b n (h e) -> b h n e", h=attn.num_heads // groups)
    if part != "v":
        norm = getattr(attn, f"{part}_norm", None)
        y = y if norm is None else norm(y)
        if rope is not None:
            y = _rotate(y, rope, getattr(attn, "rotate_half", False)).to(x.dtype)
    return y if groups == 1 else y.repeat_interleave(groups, dim=1)


def _rotate(x: Tensor, rope: Tensor, halves: bool) -> Tensor:
    """Rotary position embedding (Su et al., 2021) of neighbouring pairs or of the halves of `e`."""
    sine, cosine = rope.chunk(2, dim=-1)
    if halves:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
    else:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    return x * cosine + turned * sine


def attention_map(
    attn: Any, x: Tensor, first_row_only: bool = False, where: Positions | None = None
) -> Tensor:
    """Returns the attention map of `attn` on `x` after softmax, in float32 and without dropout.

    `b n d` -> `b h n n`, or `b h 1 n` with the first token's query alone. `where`: positional terms
    of the tokens. With talking heads it is the map before heads are mixed the second time, whose
    rows sum to 1.
    """
    rope, bias = where or Positions()
    q, k, _ = project(attn, x, rope)
    rows = 1 if first_row_only else None
    return _softmax(attn, q[:, :, :rows], k, None if bias is None else bias[:, :, :rows])


@torch.no_grad()
def received(attn: Any, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the attention each key receives: the mean over heads and queries, `b m` in float32.

    `q`, `k`: `b h n e`, `b h m e`. On a CPU the map is computed in chunks of samples that fit into
    the cache, on a GPU at once.
    """
    if q.device.type != "cpu":
        return _softmax(attn, q, k, bias).mean(dim=(1, 2))
    scores_per_sample = q.shape[1] * q.shape[2] * k.shape[2]
    size = max(1, CACHED_SCORES * torch.get_num_threads() // scores_per_sample)
    inputs = [q, k] if bias is None else [q, k, bias.expand(len(q), -1, -1, -1)]
    chunks = zip(*(x.split(size) for x in inputs), strict=True)
    return torch.cat([_softmax(attn, *chunk).mean(dim=(1, 2)) for chunk in chunks])


def _softmax(attn: Any, q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns the attention map in float32, by scores that float16 could not hold.

    Fused kernels hold theirs in float32 too. Talking heads are mixed in their own precision.
    """
    mix = getattr(attn, "proj_l", None)
    exact = torch.promote_types(q.dtype, torch.float32) if mix is None else mix.weight.dtype
    with without_autocast(q.device.type):
        scores = _scores(attn, q.to(exact), k.to(exact), bias)
        return scores.softmax(dim=-1, dtype=torch.float32)


def _scores(attn: Any, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the scaled scores before softmax, `b h n m`."""
    scores = _scaled_product(q, k, attn.scale)
    if getattr(attn, "proj_l", None) is not None:
        scores = _mix_heads(attn.proj_l, scores)
    return scores if bias is None else scores + bias


def _scaled_product(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Returns `scale q k^T`, computed by one kernel: `... n e`, `... m e` -> `... n m`."""
    rows, columns = q.flatten(0, -3), k.flatten(0, -3).mT
    product = torch.baddbmm(q.new_empty(()), rows, columns, beta=0, alpha=scale)
    return product.unflatten(0, q.shape[:-2])


def _mix_heads(mix: nn.Module, x: Tensor) -> Tensor:
    """Mixes heads linearly (talking-heads attention, Shazeer et al., 2020)."""
    return mix(x.movedim(1, -1)).movedim(-1, 1)


def composed_map(attn: Any, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor | None:
    """Returns the map that `attend` uses, `b h n m` before dropout; None with a fused kernel."""
    if getattr(attn, "fused_attn", True) and getattr(attn, "proj_w", None) is None:
        return None
    return _scores(attn, q, k, bias).softmax(dim=-1)


def attend(
    attn: Any,
    x: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    weights: Tensor | None = None,
) -> Tensor:
    """Returns the output of `attn`, `b n d`, for queries `q` of the tokens `x`, keys and values.

    `weights`: their `composed_map`, if already computed.
    """
    dropout = attn.attn_drop.p if attn.training else 0.0
    if weights is None:
        weights = composed_map(attn, q, k, bias)
    if weights is None:
        out = F.scaled_dot_product_attention(q, k, v, bias, dropout, scale=attn.scale)
    else:
        if getattr(attn, "proj_w", None) is not None:
            weights = _mix_heads(attn.proj_w, weights)
        out = F.dropout(weights, dropout) @ v
    out = rearrange(out, "b h n e -> b n (h e)")
    if isinstance(norm := getattr(attn, "norm", None), nn.Module):
        out = norm(out)
    if isinstance(gate := getattr(attn, "gate", None), nn.Module):
        out = out * gate(x).sigmoid()
    return attn.proj_drop(attn.proj(out))
