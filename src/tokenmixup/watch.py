"""Sees the softmax attention that a block computes, whatever the block consists of.

A block runs under `Watching`, which sees its calls of scaled_dot_product_attention, softmax and
multi_head_attention_forward. Those over all tokens of the block are its attention maps. VTM's
memory is m further tokens after the block's own n, which are keys and values. Once the map is seen
nothing needs their rows: fused attention and dropout leave them out and return zeros there. The
first sum of tokens after the map, the residual one, cuts both summands to the block's own n, and
the rest of the block works on these alone. What else is computed for the memory, such as queries,
is not used; what a block returns for it is cut off.

Letters: b batch, h heads, n the block's own tokens, m memory tokens, q queries, k keys, e head
width, d width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tokenmixup.attention import AttentionMap

FUSED = torch._C._nn.scaled_dot_product_attention  # the name in `F` may be somebody's wrapper
MULTIHEAD = F.multi_head_attention_forward
SUM = (torch.add, Tensor.add)  # also that of `+`
SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)
OWN_CHECKPOINTING = (
    "runs without gradients or under the model's own gradient checkpointing, which would rerun it "
    "without TokenMixup: use attach(..., checkpoint_blocks=True)"
)


class MapSeen(BaseException):
    """Ends the run of a block once its map is known.

    A BaseException, so that a model's own `except Exception` does not catch it.
    """


Autograd = tuple[bool, Any]  # whether it records operations, and the checkpoint around them


def autograd_now() -> Autograd:
    """Returns the state of autograd, which is another one within a gradient checkpoint.

    Of checkpoints it sees those of torch that are not reentrant.
    """
    is_recorded = torch.is_grad_enabled()
    if torch.compiler.is_compiling():  # compiled, a rerun is right
        return is_recorded, None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or hooks[0].__module__ != "torch.utils.checkpoint":
        return is_recorded, None
    return is_recorded, hooks[0]


@dataclass(eq=False)
class Watching(TorchFunctionMode):
    """While it is entered, sees the attention maps of the block that runs."""

    name: str  # of the block
    b: int
    n: int  # its own tokens
    any_shape: bool  # whether maps of windows, or with fewer keys, count too
    keeps_map: bool  # in `map`, the first one
    only_map: bool  # MapSeen ends the run at the first one
    memory_indices: Tensor | None  # b m, in 0..n-1: the index of each in the block it comes from
    hides_memory: bool  # from every query, for the trial
    count: int = 0  # of maps
    map: AttentionMap | None = None
    autograd: Autograd = field(default_factory=autograd_now)

    def total(self) -> int:
        """The number of tokens, with those of a memory.

        A method, since torch.compile does not see the properties of a mode.
        """
        if self.memory_indices is None:
            return self.n
        return self.n + self.memory_indices.shape[1]

    def is_map(self, shape: torch.Size) -> bool:
        """Whether `b .. q k` can be the shape of a map: q = k = n + m, or any with `any_shape`.

        Also q = k = n: after the residual sum the block works on n tokens, and a second map there
        must be counted, to be refused.
        """
        if len(shape) < 3:
            return False
        is_square = shape[-2] == shape[-1]
        over_all = shape[0] == self.b and is_square and shape[-1] in (self.n, self.total())
        return over_all or self.any_shape

    def is_memory(self, device: torch.device) -> Tensor:
        """Which of all tokens are the memory's, `n+m` bool."""
        return torch.arange(self.total(), device=device) >= self.n

    def are_tokens(self, x: Any) -> bool:
        """Whether `x` is `b n d` or `b n+m d`."""
        if not isinstance(x, Tensor) or x.ndim != 3:
            return False
        return len(x) == self.b and x.shape[1] in (self.n, self.total())

    def drops_memory(self) -> bool:
        """Whether a memory's rows are left out: there is one, and the map is seen.

        They stay in a part of the block under gradient checkpointing, since its rerun is not
        watched, and where `b n+m d` could be `n+m b d`.
        """
        if self.memory_indices is None or self.count == 0:
            return False
        return self.autograd == autograd_now() and self.b != self.total()

    def note(self, seen: AttentionMap | None) -> None:
        """Counts a map, and keeps the first one if `keeps_map`.

        Raises ValueError for a memory under gradient checkpointing: the rerun would not have it.
        """
        if self.memory_indices is not None and self.autograd != autograd_now():
            raise ValueError(f"{self.name} {OWN_CHECKPOINTING}")
        self.count += 1
        if self.keeps_map and self.map is None:
            self.map = seen
        if self.only_map:
            raise MapSeen

    def check(self) -> None:
        """Raises ValueError unless the block has computed one map."""
        if self.count != 1:
            found = f"computes {self.count} attention maps over its tokens"
            raise ValueError(f"{self.name} {found}, must be 1")

    def kept_map(self) -> AttentionMap:
        """Returns the map, which was to be kept. Raises ValueError unless there was one."""
        self.check()
        assert self.map is not None  # keeps_map
        return self.map

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
        if func is F.dropout and self.drops_memory():
            return _dropout(self, *args, **kwargs)
        if func in SUM and self.drops_memory():
            return _sum(self, func, *args, **kwargs)
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
    """Attends as scaled_dot_product_attention; a memory's tokens are keys and values only."""
    if is_causal:
        raise ValueError("TokenMixup does not support causal attention")
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    if not watching.is_map(query.shape[:-1] + key.shape[-2:-1]):  # b .. q k
        return FUSED(query, key, value, attn_mask, **options)
    if attn_mask is not None:
        missing = query.ndim - attn_mask.ndim
        attn_mask = attn_mask[(None,) * missing]  # b|1 .. q k, as many dimensions as the query
    if watching.memory_indices is not None:
        query = query[..., : watching.n, :]
        attn_mask = _of_own_queries(attn_mask, watching.n, watching.memory_indices)
    if scale is None:  # of the map; `options` have what was given
        scale = query.shape[-1] ** -0.5
    watching.note(AttentionMap(_noted(query), _noted(key), _noted(attn_mask), scale))
    if watching.hides_memory:
        key = key[..., : watching.n, :]
        value = value[..., : watching.n, :]
        if attn_mask is not None:
            attn_mask = attn_mask[..., : watching.n]
    return _padded(FUSED(query, key, value, attn_mask, **options), watching)


def _padded(x: Tensor, watching: Watching) -> Tensor:
    """Appends rows of zeros for a memory, whose own rows were left out: `.. n d` -> `.. n+m d`."""
    if watching.memory_indices is None:
        return x
    return F.pad(x, (0, 0, 0, watching.total() - watching.n))


def _noted(x: Tensor | None) -> Tensor | None:
    """Returns a tensor of a map as it is noted: detached, and `b h ..`.

    One head may have no dimension of its own: `b n ..` -> `b 1 n ..`.
    """
    if x is None:
        return None
    if x.ndim > 3:
        return x.detach()
    return x.detach()[:, None]


def _of_own_queries(mask: Tensor | None, n: int, memory_indices: Tensor) -> Tensor | None:
    """Returns a mask of n queries over n + m keys, `b .. n|1 n+m`.

    One from outside has n keys, `b|1 .. n|1 n`: a memory token gets the column of its index. One
    that the block has made for all its tokens, `.. n+m n+m`, loses the rows of the memory.
    """
    if mask is None:
        return None
    if mask.shape[-1] != n:
        return mask[..., :n, :]
    mask = mask.expand(len(memory_indices), *mask.shape[1:])
    index = memory_indices
    while index.ndim < mask.ndim:
        index = index[:, None]  # b 1 .. m
    return torch.cat([mask, mask.take_along_dim(index, dim=-1)], dim=-1)


def _softmax(
    watching: Watching,
    func: Callable[..., Any],
    input: Tensor,
    dim: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Runs a softmax; one over all tokens returns a map, which is noted."""
    is_map = dim in (-1, input.ndim - 1) and watching.is_map(input.shape)
    if is_map and watching.hides_memory:
        input = input.masked_fill(watching.is_memory(input.device), -torch.inf)
    out: Tensor = func(input, dim, *args, **kwargs)
    if is_map:
        watching.note(AttentionMap(weights=_noted(out)))
    return out


def _dropout(watching: Watching, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Draws for the block's own tokens alone, as without a memory."""
    if input.ndim < 3 or input.shape[-2] != watching.total():
        return F.dropout(input, *args, **kwargs)
    return _padded(F.dropout(input[..., : watching.n, :], *args, **kwargs), watching)


def _sum(watching: Watching, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """Adds; the sum of two tensors of tokens, `b n|n+m d`, is that of the own ones, `b n d`."""
    if all(watching.are_tokens(x) for x in args):
        args = tuple(x[:, : watching.n] for x in args)
    return func(*args, **kwargs)


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
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Runs multi_head_attention_forward, `n b d`, which hides its own calls, and notes its map."""
    if watching.is_map(torch.Size([query.shape[1], num_heads, len(query), len(key)])):
        has_further_keys = bias_k is not None or add_zero_attn
        has_mask = key_padding_mask is not None or attn_mask is not None
        if in_proj_weight is None or has_further_keys or has_mask:
            raise ValueError(
                "TokenMixup supports torch's multi-head attention without a mask, bias_k, bias_v "
                "and add_zero_attn, and with one width of queries, keys and values"
            )
        seen = None
        if watching.keeps_map:
            seen = _map_of_multihead(query, key, num_heads, in_proj_weight, in_proj_bias)
        watching.note(seen)
        if watching.hides_memory:
            attn_mask = watching.is_memory(query.device).expand(len(query), -1)
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
        dropout_p,
        out_proj_weight,
        out_proj_bias,
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
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
