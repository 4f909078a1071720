"""Applies the weights of a stock attention module to other queries, keys and values.

`Parts` says what such a module consists of; nothing else of it is read here.
Letters: b batch, h heads, n tokens with prefix, m memory, d width, e head width.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from tokenmixup.contexts import without_autocast
from tokenmixup.device import has_kernels, operator

# Attention scores in a chunk of samples: on a CPU for each core, half a MiB; on a GPU, or by a
# compiler, 64 MiB, and as much again before softmax.
CACHED_SCORES, HELD_SCORES = 2**17, 2**24
HALF = (torch.float16, torch.bfloat16)
HELD_KEYS = 2**15  # numbers of a head's keys, in powers of two, that the kernel holds: 64 KiB
POSITIONAL = ("rope", "attn_mask", "shared_rel_pos", "shared_rel_pos_bias")


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
    # What some of timm's attentions have in addition; None if a module has no such term.
    q_norm: Callable[[Tensor], Tensor] | None = None  # of the queries, b h n e
    k_norm: Callable[[Tensor], Tensor] | None = None  # of the keys
    num_kv_groups: int = 1  # heads that share their keys and values
    rotate_half: bool = False  # rotary positions turn halves of e, not neighbouring pairs
    bias: Callable[[bool], Tensor] | None = None  # whether it drops out -> 1 h n n, of positions
    mix_scores: Callable[[Tensor], Tensor] | None = None  # of heads, before softmax, b h n m
    mix_weights: Callable[[Tensor], Tensor] | None = None  # of heads, after softmax
    mixing_dtype: torch.dtype | None = None  # of `mix_scores`
    norm: Callable[[Tensor], Tensor] | None = None  # of b n (h e), before `proj`
    gate: Callable[[Tensor], Tensor] | None = None  # b n d -> factor of the normed b n (h e)
    fused: bool = True  # whether the attention map is left to a fused kernel

    def __post_init__(self) -> None:
        separate = [self.q_proj, self.k_proj, self.v_proj]
        missing = sum(layer is None for layer in separate)
        ways = [self.qkv is not None, missing == 0, self.project is not None]
        if sum(ways) != 1 or missing not in (0, 3):
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


def positions(parts: Parts, n: int, given: Mapping[str, Any], dropout: bool = True) -> Positions:
    """Returns the positional terms of `n` tokens.

    `given`: the further arguments that the block passes to its attention. `dropout`: whether
    dropout is active in an MLP that computes the attention's bias (a bias shared by all blocks
    includes its dropout). Raises ValueError for an unknown argument, such as a causal mask.
    """
    for name, value in given.items():
        if name not in POSITIONAL and value is not None and value is not False:
            raise ValueError(f"TokenMixup does not support the argument {name} of a block")
    own = None if parts.bias is None else parts.bias(dropout)
    biases = [given.get("shared_rel_pos"), given.get("shared_rel_pos_bias"), own]
    mask = given.get("attn_mask")
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
    present = [bias for bias in (*biases, mask) if bias is not None]
    bias = sum(present[1:], start=present[0]) if present else None
    return Positions(_rope_of_all(given.get("rope"), n), None if bias is None else _to_4d(bias))


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
    parts: Parts, x: Tensor, rope: Tensor | None = None, known: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Projects `b n d` to q, k and v, each `b h n e`.

    `rope`: as in Positions. `known`: the `projections` of `x`, if already computed.
    """
    if parts.project is not None:
        return list(parts.project(x))
    flat = known or projections(parts, x)
    if len(flat) == 1:
        flat = flat[0].chunk(3, dim=-1)
    groups = parts.num_kv_groups
    kv_heads = parts.num_heads // groups
    q = _heads(parts, flat[0], parts.num_heads, parts.q_norm, rope)
    k = _heads(parts, flat[1], kv_heads, parts.k_norm, rope)
    v = _heads(parts, flat[2], kv_heads)
    return [q, k, v] if groups == 1 else [q, *(y.repeat_interleave(groups, 1) for y in (k, v))]


def projections(parts: Parts, x: Tensor) -> list[Tensor]:
    """Returns the projections of `b n d`: one tensor with q, k and v side by side, or three.

    Empty if the module projects by a custom function, `Parts.project`.
    """
    layers = (parts.qkv, parts.q_proj, parts.k_proj, parts.v_proj)
    return [F.linear(x, layer.weight, layer.bias) for layer in layers if layer is not None]


def _heads(
    parts: Parts,
    x: Tensor,
    num_heads: int,
    norm: Callable[[Tensor], Tensor] | None = None,
    rope: Tensor | None = None,
) -> Tensor:
    """Splits `b n (h e)` into heads, normalises and rotates each."""
    y = rearrange(x, "b n (h e) -> b h n e", h=num_heads)
    y = y if norm is None else norm(y)
    return y if rope is None else _rotate(y, rope, parts.rotate_half).to(x.dtype)


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
    parts: Parts, x: Tensor, first_row_only: bool = False, where: Positions | None = None
) -> Tensor:
    """Returns the attention map on `x` after softmax, in float32 and without dropout.

    `b n d` -> `b h n n`, or `b h 1 n` with the first token's query alone. `where`: positional terms
    of the tokens. With talking heads it is the map before heads are mixed the second time, whose
    rows sum to 1.
    """
    rope, bias = where or Positions()
    q, k, _ = project(parts, x, rope)
    rows = 1 if first_row_only else None
    return _softmax(parts, q[:, :, :rows], k, None if bias is None else bias[:, :, :rows])


@torch.no_grad()
def received(parts: Parts, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the attention each key receives: the mean over heads and queries, `b m` in float32.

    `q`, `k`: `b h n e`, `b h m e`. On a GPU one kernel holds the map of float16 and bf16. Else it
    is computed in chunks of samples, which on a CPU fit into the cache.
    """
    is_plain = bias is None and parts.mix_scores is None and q.dtype in HALF
    if is_plain and has_kernels(q) and _held_numbers(*k.shape[2:]) <= HELD_KEYS:
        return received_on_device(q, k, parts.scale)
    in_cache = q.device.type == "cpu" and not torch.compiler.is_compiling()
    scores = CACHED_SCORES * torch.get_num_threads() if in_cache else HELD_SCORES
    size = max(1, scores // (q.shape[1] * q.shape[2] * k.shape[2]))
    inputs = [q, k] if bias is None else [q, k, bias.expand(len(q), -1, -1, -1)]
    chunks = zip(*(x.split(size) for x in inputs), strict=True)
    return torch.cat([_softmax(parts, *chunk).mean(dim=(1, 2)) for chunk in chunks])


def _held_numbers(m: int, e: int) -> int:
    """Numbers of a head's keys, `m e`, each size raised to a power of two."""
    return int(2 ** (math.ceil(math.log2(m)) + math.ceil(math.log2(e))))


def received_exactly(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """`received` of a plain attention at once, by scores in float32: `b m`."""
    return _scaled_product(q.float(), k.float(), scale).softmax(dim=-1).mean(dim=(1, 2))


received_on_device = operator(
    "received(Tensor q, Tensor k, float scale) -> Tensor",
    "kernels.received",
    received_exactly,
    lambda q, k, scale: k.new_empty(len(k), k.shape[2], dtype=torch.float32),
)


def _softmax(parts: Parts, q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns the attention map in float32, by scores that float16 could not hold.

    Fused kernels hold theirs in float32 too. Talking heads are mixed in their own precision.
    """
    exact = parts.mixing_dtype or torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q.device.type):
        scores = _scores(parts, q.to(exact), k.to(exact), bias)
        return scores.softmax(dim=-1, dtype=torch.float32)


def _scores(parts: Parts, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the scaled scores before softmax, `b h n m`."""
    assert parts.scale is not None, "set by Parts itself"
    scores = _scaled_product(q, k, parts.scale)
    if parts.mix_scores is not None:
        scores = parts.mix_scores(scores)
    return scores if bias is None else scores + bias


def _scaled_product(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Returns `scale q k^T`, computed by one kernel: `... n e`, `... m e` -> `... n m`."""
    rows, columns = q.flatten(0, -3), k.flatten(0, -3).mT
    product = torch.baddbmm(q.new_empty(()), rows, columns, beta=0, alpha=scale)
    return product.unflatten(0, q.shape[:-2])


def attend(parts: Parts, x: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the output, `b n d`, for queries `q` of the tokens `x`, keys and values."""
    if not parts.fused:
        return attend_by_map(parts, x, composed_map(parts, q, k, bias), v)
    dropout = parts.dropout if parts.training else 0.0
    out = F.scaled_dot_product_attention(q, k, v, bias, dropout, scale=parts.scale)
    return _output(parts, x, out)


def composed_map(parts: Parts, q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns the map of an attention without a fused kernel, `b h n m`, before dropout."""
    return _scores(parts, q, k, bias).softmax(dim=-1)


def attend_by_map(parts: Parts, x: Tensor, weights: Tensor, v: Tensor) -> Tensor:
    """Returns the output, `b n d`, by the `composed_map` of the tokens `x`, `b n d`."""
    if parts.mix_weights is not None:
        weights = parts.mix_weights(weights)
    return _output(parts, x, F.dropout(weights, parts.dropout if parts.training else 0.0) @ v)


def _output(parts: Parts, x: Tensor, out: Tensor) -> Tensor:
    out = rearrange(out, "b h n e -> b n (h e)")
    if parts.norm is not None:
        out = parts.norm(out)
    if parts.gate is not None:
        out = out * parts.gate(x)
    return parts.proj(out)
