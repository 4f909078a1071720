"""The weights of a stock attention module, used on other queries, keys and values.

It is timm's, or one with the same parts: `num_heads`, `scale`, `attn_drop`, `proj`, `proj_drop`; a
fused `qkv` projection or `q_proj`, `k_proj`, `v_proj`; optionally `q_bias`, `k_bias`, `v_bias`,
`q_norm`, `k_norm`, `norm`, `gate`, grouped keys, rotary positions, a bias per pair of tokens, and
talking heads. Letters: b batch, h heads, n tokens with prefix, m memory, d width, e head width.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from tokenmixup.contexts import evaluating

CACHED_SCORES = 2**17  # that a core works on at a time: half a MiB
UNDERSTOOD = ("rope", "attn_mask", "shared_rel_pos", "shared_rel_pos_bias")


class Positions(NamedTuple):
    """What an attention module adds for the places of its tokens; None where it adds nothing."""

    rope: Tensor | None = None  # b|1 h|1 n 2e: sines, then cosines, of every token's angle
    bias: Tensor | None = None  # b|1 h|1 n|1 n, added to the scaled scores, query x key

    def of_memory(self, places: Sequence[Tensor]) -> "Positions":
        """Those of tokens and a memory: its keys stand at `places` (each `b kappa`, in `n`)."""
        rope, bias = self
        if rope is None and bias is None:
            return self
        index = torch.cat(list(places), dim=1)  # b m
        if rope is not None:
            rope = rope.expand(len(index), -1, -1, -1)
            rope = torch.cat([rope, rope.take_along_dim(index[:, None, :, None], dim=2)], dim=2)
        if bias is not None:
            bias = bias.expand(len(index), -1, -1, -1)
            bias = torch.cat([bias, bias.take_along_dim(index[:, None, None], dim=3)], dim=3)
        return Positions(rope, bias)


def positions(attn: Any, n: int, given: Mapping[str, Any], dropout: bool = True) -> Positions:
    """The positions of `n` tokens: `given` are the arguments that the block hands to `attn`.

    `dropout`: whether an MLP of `attn` that computes its bias drops out in training mode; a bias
    that all blocks share comes with its dropout. Raises ValueError for an argument that is not
    understood, such as a causal mask.
    """
    unknown = [
        name
        for name, value in given.items()
        if name not in UNDERSTOOD and value is not None and value is not False
    ]
    if unknown:
        raise ValueError(f"TokenMixup does not understand the argument {unknown[0]} of a block")
    own = _own_bias(attn, dropout)
    biases = [given.get("shared_rel_pos"), given.get("shared_rel_pos_bias"), own]
    mask = given.get("attn_mask")
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
    present = [bias for bias in (*biases, mask) if bias is not None]
    bias = sum(present[1:], start=present[0]) if present else None
    return Positions(_rope_of_all(given.get("rope"), n), None if bias is None else _to_4d(bias))


def _own_bias(attn: Any, dropout: bool) -> Tensor | None:
    """A relative position bias that the module itself holds, `1 h n n`."""
    if getattr(attn, "relative_position_bias_table", None) is not None:
        return attn._get_rel_pos_bias()
    own = getattr(attn, "rel_pos", None)
    if own is None:
        return None
    with nullcontext() if dropout else evaluating(own):
        return own.get_bias()


def _rope_of_all(rope: Tensor | None, n: int) -> Tensor | None:
    """Rotary positions of all tokens: those in front of the given ones are not rotated."""
    if rope is None:
        return None
    rope = _to_4d(rope)  # b|1 h|1 t 2e
    still = rope.new_zeros(*rope.shape[:2], n - rope.shape[2], rope.shape[3])
    still.chunk(2, dim=-1)[1].fill_(1)  # sine 0, cosine 1
    return torch.cat([still, rope], dim=2)


def _to_4d(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.ndim)]


def project(
    attn: Any, x: Tensor, rope: Tensor | None = None, known: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Projects `b n d` to q, k and v, each `b h n e`.

    `rope`: of these tokens, as in Positions. `known`: the `projections` of `x`, if computed before.
    """
    if (own := getattr(attn, "project", None)) is not None:
        return list(own(x))
    flat = known or projections(attn, x)
    if len(flat) == 1:
        flat = flat[0].chunk(3, dim=-1)
    return [_heads(attn, part, y, rope) for part, y in zip("qkv", flat, strict=True)]


def projections(attn: Any, x: Tensor) -> list[Tensor]:
    """The projections of `b n d`: one tensor that holds q, k and v, or three.

    Empty if the module projects by a function of its own, `Parts.project`.
    """
    if getattr(attn, "project", None) is not None:
        return []
    return [F.linear(x, *layer) for layer in _projecting(attn)]


def _projecting(attn: Any) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of each layer."""
    if getattr(attn, "qkv", None) is None:
        layers = [getattr(attn, f"{part}_proj") for part in "qkv"]
        return [(layer.weight, layer.bias) for layer in layers]
    bias = attn.qkv.bias
    if getattr(attn, "q_bias", None) is not None:  # BEiT and EVA: keys have none to learn
        bias = torch.cat([getattr(attn, f"{part}_bias") for part in "qkv"])
    return [(attn.qkv.weight, bias)]


def _heads(attn: Any, part: str, x: Tensor, rope: Tensor | None) -> Tensor:
    """Splits `b n (h e)`, normalises and rotates queries and keys, repeats grouped ones."""
    groups = 1 if part == "q" else getattr(attn, "num_kv_groups", 1)
    y = rearrange(x, "b n (h e) -> b h n e", h=attn.num_heads // groups)
    if part != "v":
        norm = getattr(attn, f"{part}_norm", None)
        y = y if norm is None else norm(y)
        if rope is not None:
            y = _rotate(y, rope, getattr(attn, "rotate_half", False)).to(x.dtype)
    return y if groups == 1 else y.repeat_interleave(groups, dim=1)


def _rotate(x: Tensor, rope: Tensor, halves: bool) -> Tensor:
    """Rotary position embedding (Su et al., 2021), of neighbours or of the two halves of `e`."""
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
    """The map after softmax that `attn` computes on `x`, in float32 and without dropout.

    `b n d` -> `b h n n`, or `b h 1 n` for the first token's query alone. `where`: the positions of
    the tokens. Of talking heads it is the map before the heads talk again, a distribution.
    """
    rope, bias = where or Positions()
    q, k, _ = project(attn, x, rope)
    rows = 1 if first_row_only else None
    return _softmax(attn, q[:, :, :rows], k, None if bias is None else bias[:, :, :rows])


@torch.no_grad()
def received(attn: Any, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """What each key receives: the mean of the map over heads and queries, `b m` in float32.

    `q`, `k`: `b h n e`, `b h m e`. A CPU takes a few samples at a time, whose maps stay in its
    cache; a GPU takes all at once.
    """
    if q.device.type != "cpu":
        return _softmax(attn, q, k, bias).mean(dim=(1, 2))
    scores = q.shape[1] * q.shape[2] * k.shape[2]  # of a sample
    samples = max(1, CACHED_SCORES * torch.get_num_threads() // scores)
    inputs = [q, k] if bias is None else [q, k, bias.expand(len(q), -1, -1, -1)]
    chunks = zip(*(x.split(samples) for x in inputs), strict=True)
    return torch.cat([_softmax(attn, *chunk).mean(dim=(1, 2)) for chunk in chunks])


def _softmax(attn: Any, q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """The map, in float32."""
    return _scores(attn, q, k, bias).softmax(dim=-1, dtype=torch.float32)


def _scores(attn: Any, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Scaled scores before softmax, `b h n m`."""
    scores = _scaled_product(q, k, attn.scale)
    if getattr(attn, "proj_l", None) is not None:
        scores = _talk(attn.proj_l, scores)
    return scores if bias is None else scores + bias


def _scaled_product(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """`scale q k^T` in one operation: `... n e`, `... m e` -> `... n m`."""
    rows, columns = q.flatten(0, -3), k.flatten(0, -3).mT
    product = torch.baddbmm(q.new_empty(()), rows, columns, beta=0, alpha=scale)
    return product.unflatten(0, q.shape[:-2])


def _talk(mix: nn.Module, x: Tensor) -> Tensor:
    """Mixes heads linearly (talking-heads attention, Shazeer et al., 2020)."""
    return mix(x.movedim(1, -1)).movedim(-1, 1)


def composed_map(attn: Any, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor | None:
    """The map by which `attend` attends, `b h n m` before dropout; None where a kernel is fused."""
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
    """Attention of `q` to `k` and `v`, then the rest of `attn`; `x` are the queries' tokens.

    `weights`: their `composed_map`, where it is known.
    """
    dropout = attn.attn_drop.p if attn.training else 0.0
    if weights is None:
        weights = composed_map(attn, q, k, bias)
    if weights is None:
        out = F.scaled_dot_product_attention(q, k, v, bias, dropout, scale=attn.scale)
    else:
        if getattr(attn, "proj_w", None) is not None:
            weights = _talk(attn.proj_w, weights)
        out = F.dropout(weights, dropout) @ v
    out = rearrange(out, "b h n e -> b n (h e)")
    if isinstance(norm := getattr(attn, "norm", None), nn.Module):
        out = norm(out)
    if isinstance(gate := getattr(attn, "gate", None), nn.Module):
        out = out * gate(x).sigmoid()
    return attn.proj_drop(attn.proj(out))
