"""The softmax attention that a block computes, whatever the block consists of: seen, and its map.

A block runs under `Watching`, which sees its calls of scaled_dot_product_attention, softmax and
multi_head_attention_forward. The one over all tokens of the block is its attention. VTM's memory
is m further tokens, which are keys and values only (Eq. 13): a first run, on these tokens alone,
ends at the attention and gives theirs; the run on the block's own tokens appends them there.

Letters: b batch, h heads, n the block's own tokens, m memory tokens, q queries, k keys, e head
width, d width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tokenmixup.assignment import HAS_TRITON
from tokenmixup.contexts import without_autocast

FUSED = F.scaled_dot_product_attention
MULTIHEAD = F.multi_head_attention_forward
SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax)
MUST_BE_ONE = (
    "must be 1: one call for all samples, heads and queries, of a softmax or of "
    "scaled_dot_product_attention, over the block's own tokens alone"
)
NOT_FUSED = (
    "attends by a softmax of its own: VTM needs F.scaled_dot_product_attention (of timm's models "
    "fused_attn, of transformers' attn_implementation=sdpa) or torch's multi-head attention"
)
HALF = (torch.float16, torch.bfloat16)
# What the kernel holds of one head's keys: 64 KiB. In elements, keys x width, each of them rounded
# up to a power of two, 16 or more
HELD_KEYS = 2**15


@dataclass
class AttentionMap:
    """An attention map, `b h .. q k`, given by queries and keys or by its weights."""

    q: Tensor | None = None  # b h .. q e
    k: Tensor | None = None  # b h .. k e
    mask: Tensor | None = None  # added to the scaled scores; or bool: which scores count
    scale: float = 1.0  # of the scores
    weights: Tensor | None = None  # b h .. q k, after softmax

    def probabilities(self, queries: int | None = None) -> Tensor:
        """Returns the map of the first queries; each row sums to 1.

        Or to 0, if `mask` hides all of its keys. In float32 or wider, since scores could overflow
        float16.
        """
        if self.weights is not None:
            weights = self.weights[..., :queries, :]
            return weights.to(torch.promote_types(weights.dtype, torch.float32))
        assert self.q is not None and self.k is not None  # as there are no weights
        q = self.q[..., :queries, :]
        # decorated, a method could not be compiled by torch 2.11
        with torch.no_grad(), without_autocast(q.device.type):
            scores = _scores(q, self.k, self.scale)
            if self.mask is None:
                return scores.softmax(dim=-1)
            mask = self.mask
            if mask.shape[-2] > 1:
                mask = mask[..., :queries, :]
            if mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, -torch.inf)
            else:
                scores = scores + mask
            sees_none = scores.isneginf().all(dim=-1, keepdim=True)
            return scores.softmax(dim=-1).masked_fill(sees_none, 0)  # as fused attention

    def received(self, queries: int | None = None) -> Tensor:
        """Returns what each key receives, `b .. k`: the mean over heads and queries."""
        if self.q is None or self.k is None:
            return self.probabilities(queries).mean(dim=(1, -2))
        q = self.q[..., :queries, :]
        if self.mask is None and _has_kernel(q, self.k):
            return received_on_device(q, self.k, self.scale)
        return self.probabilities(queries).mean(dim=(1, -2))


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Returns scaled products of queries and keys, `b h .. q k`, in float32 or wider."""
    if q.shape[1] != k.shape[1]:  # heads share their keys
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    wide = torch.promote_types(q.dtype, torch.float32)
    queries, keys = (x.to(wide).flatten(0, -3) for x in (q, k))
    empty = q.new_empty((), dtype=wide)
    # scale * queries @ keys.mT in one kernel; beta=0 ignores `empty`
    scores = torch.baddbmm(empty, queries, keys.mT, beta=0, alpha=scale)
    return scores.unflatten(0, q.shape[:-2])


def _has_kernel(q: Tensor, k: Tensor) -> bool:
    """Whether one kernel takes these: float16 or bf16, `b h q e`, and a head's keys fit into it."""
    if not (q.is_cuda and HAS_TRITON and q.ndim == 4 and q.shape[:2] == k.shape[:2]):
        return False
    exponents = [max(4, math.ceil(math.log2(size))) for size in k.shape[2:]]  # of 16 or more
    return q.dtype in HALF and 2 ** sum(exponents) <= HELD_KEYS


@torch.library.custom_op("tokenmixup::received", mutates_args=())
def received_on_device(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """What keys receive, by one kernel: `b h q e`, `b h k e` -> `b k` float32."""
    from tokenmixup.attention_kernel import received

    with torch.cuda.device(q.device):  # Triton launches on the current one
        return received(q, k, scale)


@received_on_device.register_fake
def _(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return k.new_empty(len(k), k.shape[2], dtype=torch.float32)


class MapSeen(BaseException):
    """Ends the run of a block once its map is known.

    A BaseException, so that a model's own `except Exception` does not catch it.
    """


# What queries meet of some tokens: keys and values, `b .. k e`; of torch's multi-head attention
# `b k d`, which is yet to project them
Attended = tuple[Tensor, Tensor]


class AttendedMemory(NamedTuple):
    """The same of VTM's memory."""

    attended: Attended
    indices: Tensor  # b m, in 0..n-1: the index of each token in the block it comes from


@dataclass(eq=False)
class Watching(TorchFunctionMode):
    """While it is entered, sees the attention of the block that runs."""

    name: str  # of the block
    b: int
    n: int  # its tokens
    any_shape: bool  # whether maps of windows, or with fewer keys, count too
    ends: bool = False  # the run ends at the attention, by MapSeen
    memory: AttendedMemory | None = None  # is appended to the own keys and values
    maps: int = 0  # calls that have the shape of a map
    seen: AttentionMap | None = None  # its map over the own keys
    attended: Attended | None = None

    def is_map(self, shape: torch.Size) -> bool:
        """Whether `b .. q k` can be the shape of a map: q = k = n, or any with `any_shape`."""
        if len(shape) < 3:
            return False
        return self.any_shape or (shape[0] == self.b and shape[-2] == shape[-1] == self.n)

    def note(self, seen: AttentionMap) -> None:
        """Notes the map of the block's attention."""
        self.maps += 1
        self.seen = seen
        if self.ends:
            raise MapSeen

    def attends(self, seen: AttentionMap, keys: Tensor, values: Tensor) -> Attended:
        """Notes the map; returns keys and values, after the block's own those of the memory."""
        self.attended = (keys, values)
        self.note(seen)
        if self.memory is None:
            return keys, values
        self.map()  # there must be one
        more_keys, more_values = self.memory.attended
        return torch.cat([keys, more_keys], dim=-2), torch.cat([values, more_values], dim=-2)

    def map(self) -> AttentionMap:
        """Returns the map. Raises ValueError unless the block computes one."""
        if self.seen is None or self.maps != 1:
            found = f"computes {self.maps} attention maps over its tokens"
            raise ValueError(f"{self.name} {found}, {MUST_BE_ONE}")
        return self.seen

    def fused(self) -> Attended:
        """Returns keys and values. Raises ValueError for an attention that does not tell them."""
        self.map()
        if self.attended is None:
            raise ValueError(f"{self.name} {NOT_FUSED}")
        return self.attended

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # torch leaves the mode meanwhile, so that what is called from here is not seen again
        kwargs = kwargs or {}
        if func is FUSED:
            return _fused(self, *args, **kwargs)
        if func is MULTIHEAD:
            return _multihead(self, *args, **kwargs)
        if func in SOFTMAX:
            return _softmax(self, func, *args, **kwargs)
        return func(*args, **kwargs)


# Arguments below have the names of torch's functions.


def _fused(
    watching: Watching,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attends as scaled_dot_product_attention, to a memory as well."""
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    if not watching.is_map(query.shape[:-1] + key.shape[-2:-1]):  # b .. q k
        return FUSED(query, key, value, attn_mask, is_causal=is_causal, **options)
    if is_causal:
        raise ValueError(f"{watching.name} attends causally, which TokenMixup does not support")
    if attn_mask is not None:
        missing = query.ndim - attn_mask.ndim
        attn_mask = attn_mask[(None,) * missing]  # b|1 .. q k, as many dimensions as the query
    if scale is None:  # of the map; `options` have what was given
        scale = query.shape[-1] ** -0.5
    seen = AttentionMap(_noted(query), _noted(key), _noted(attn_mask), scale)
    key, value = watching.attends(seen, key, value)
    if watching.memory is not None:
        attn_mask = _with_columns(attn_mask, watching.memory.indices)
    return FUSED(query, key, value, attn_mask, **options)


def _noted(x: Tensor | None) -> Tensor | None:
    """Returns a tensor of a map as it is noted: detached, and `b h ..`.

    One head may have no dimension of its own: `b n ..` -> `b 1 n ..`.
    """
    if x is None:
        return None
    if x.ndim > 3:
        return x.detach()
    return x.detach()[:, None]


def _with_columns(mask: Tensor | None, memory_indices: Tensor) -> Tensor | None:
    """Returns a mask, `b|1 .. n|1 n|1`, in which a memory token has the column of its index."""
    if mask is None or mask.shape[-1] == 1:
        return mask
    mask = mask.expand(len(memory_indices), *mask.shape[1:])
    missing = (None,) * (mask.ndim - 2)
    of_memory = mask.take_along_dim(memory_indices[(slice(None), *missing)], dim=-1)
    return torch.cat([mask, of_memory], dim=-1)


def _softmax(
    watching: Watching,
    func: Callable[..., Any],
    input: Tensor,
    dim: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Runs a softmax; one over all tokens returns a map, which is noted."""
    out: Tensor = func(input, dim, *args, **kwargs)
    if dim in (-1, input.ndim - 1) and watching.is_map(input.shape):
        watching.note(AttentionMap(weights=_noted(out)))
    return out


def _multihead(
    watching: Watching,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs multi_head_attention_forward, `n b d`, which hides its own calls, and notes its map.

    Its keys and values are tokens, which it projects one by one, and so are those of a memory.
    """
    if watching.is_map(torch.Size([query.shape[1], num_heads, len(query), len(key)])):
        has_further_keys = bias_k is not None or add_zero_attn
        has_mask = any(kwargs.get(x) is not None for x in ("key_padding_mask", "attn_mask"))
        if in_proj_weight is None or has_further_keys or has_mask:
            raise ValueError(
                f"{watching.name}: TokenMixup supports torch's multi-head attention without a "
                "mask, bias_k, bias_v and add_zero_attn, and with one width of queries, keys and "
                "values"
            )
        seen = _map_of_multihead(query, key, num_heads, in_proj_weight, in_proj_bias)
        attended = watching.attends(seen, key.transpose(0, 1), value.transpose(0, 1))
        key, value = (x.transpose(0, 1) for x in attended)
    return MULTIHEAD(
        query,
        key,
        value,
        embed_dim_to_check,
        num_heads,
        in_proj_weight,
        in_proj_bias,
        bias_k,
        bias_v,
        add_zero_attn,
        *args,
        **kwargs,
    )


def _map_of_multihead(
    query: Tensor, key: Tensor, heads: int, weight: Tensor, bias: Tensor | None
) -> AttentionMap:
    """`weight`, `bias`: of the projections of queries, keys and values, stacked."""
    q_weight, k_weight, _ = weight.chunk(3)
    q_bias, k_bias = None, None
    if bias is not None:
        q_bias, k_bias, _ = bias.chunk(3)
    q = _by_head(F.linear(query, q_weight, q_bias), heads)
    k = _by_head(F.linear(key, k_weight, k_bias), heads)
    return AttentionMap(q, k, scale=q.shape[-1] ** -0.5)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """`n b (h e)` -> `b h n e`, detached."""
    return x.detach().unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
