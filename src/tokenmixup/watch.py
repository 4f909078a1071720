"""Sees the softmax attention that a block computes, whatever the block consists of.

A block runs under `Watching`, which sees its calls of scaled_dot_product_attention, softmax and
multi_head_attention_forward. Those over all tokens of the block are its attention maps. VTM's
memory is m further tokens, which are keys and values only (Eq. 13). A first run, on these tokens
alone, ends at the attention and gives theirs; the run on the block's own tokens appends them there.
Nothing else of the block is touched: it may do with its own tokens what it likes.

Letters: b batch, h heads, n the block's own tokens, m memory tokens, q queries, k keys, e head
width, d width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tokenmixup.attention import AttentionMap

FUSED = torch._C._nn.scaled_dot_product_attention  # the name in `F` may be somebody's wrapper
MULTIHEAD = F.multi_head_attention_forward
SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax)
OWN_CHECKPOINTING = (
    "runs without gradients or under the model's own gradient checkpointing, which would rerun it "
    "without TokenMixup: use attach(..., checkpoint_blocks=True)"
)
MUST_BE_ONE = (
    "must be 1: one call for all samples, heads and queries, of a softmax or of "
    "scaled_dot_product_attention, over the block's own tokens alone"
)
NOT_FUSED = (
    "attends by a softmax of its own: VTM needs F.scaled_dot_product_attention (of timm's models "
    "fused_attn, of transformers' attn_implementation=sdpa) or torch's multi-head attention"
)

STILL_NEEDED = "TokenMixup still needs them, use x = x + ..."


class Refused(ValueError):
    """A block that cannot be served; one line names it and says why."""


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


class Attended(NamedTuple):
    """What the queries of a block's attention meet, of some of its tokens."""

    keys: Tensor  # b .. k e; of torch's multi-head attention b k d, which is yet to project them
    values: Tensor  # likewise


class AttendedMemory(NamedTuple):
    """The same of VTM's memory."""

    keys: Tensor  # b .. m e, or b m d
    values: Tensor
    indices: Tensor  # b m, in 0..n-1: the index of each token in the block it comes from

    def after(self, own: Attended) -> Attended:
        """Returns a block's own keys and values, then those of the memory."""
        keys = torch.cat([own.keys, self.keys], dim=-2)
        values = torch.cat([own.values, self.values], dim=-2)
        return Attended(keys, values)


class Sight(NamedTuple):
    """What the proof of a block has found out about its runs; by default nothing."""

    nth_map: int = 1  # which of the calls that have the shape of a map is its attention, from 1
    num_maps: int = 1  # how many have that shape
    runs_whole: bool = False  # ended at its attention, a run would leave the block changed
    generators: tuple[Any, ...] = ()  # from which it draws in front of its attention


@dataclass(eq=False)
class Watching(TorchFunctionMode):
    """While it is entered, sees the attention of the block that runs."""

    name: str  # of the block
    b: int
    n: int  # its tokens
    any_shape: bool  # whether maps of windows, or with fewer keys, count too
    sight: Sight
    keeps_map: bool = True
    ends: bool = False  # the run ends at the attention, by MapSeen
    of_memory: bool = False  # the run is for `attended`
    memory: AttendedMemory | None = None  # is appended to the own keys and values
    candidates: dict[int, AttentionMap | None] | None = None  # gets all maps, by their call
    calls: int = 0  # that are seen, whatever their shape
    maps: int = 0  # of these, that have the shape of a map
    kept: AttentionMap | None = None  # its map over the own keys
    attended: Attended | None = None
    autograd: Autograd = field(default_factory=autograd_now)

    def is_map(self, shape: torch.Size) -> bool:
        """Whether `b .. q k` can be the shape of a map: q = k = n, or any with `any_shape`."""
        if len(shape) < 3:
            return False
        return self.any_shape or (shape[0] == self.b and shape[-2] == shape[-1] == self.n)

    def note(self, seen: AttentionMap | None, attended: Attended | None) -> bool:
        """Notes a call that has the shape of a map. Returns whether it is the block's attention.

        Raises Refused for a memory under gradient checkpointing, whose rerun would not have it, and
        for one that a softmax by hand does not attend to.
        """
        self.maps += 1
        if self.candidates is not None:
            self.candidates[self.calls] = seen
        if self.maps != self.sight.nth_map:
            return False
        if self.of_memory or self.memory is not None:
            if self.autograd != autograd_now():
                raise Refused(f"{self.name} {OWN_CHECKPOINTING}")
            if attended is None:
                raise Refused(f"{self.name} {NOT_FUSED}")
        if self.keeps_map:
            self.kept = seen
        self.attended = attended
        if self.ends:
            raise MapSeen
        return True

    def check(self) -> None:
        """Raises Refused unless the block has attended, as often as its proof tells."""
        sees_all = not self.ends and not self.of_memory
        expected = self.sight.num_maps
        is_seen = self.maps >= self.sight.nth_map
        if not is_seen or (sees_all and self.maps != expected):
            found = f"computes {self.maps} attention maps over its tokens"
            must = MUST_BE_ONE if expected == 1 else f"must be {expected} as when it was tried"
            raise Refused(f"{self.name} {found}, {must}")

    def kept_map(self) -> AttentionMap:
        """Returns the map, which was to be kept. Raises Refused as `check`."""
        self.check()
        assert self.kept is not None  # keeps_map
        return self.kept

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
            self.calls += 1
            return _fused(self, *args, **kwargs)
        if func is MULTIHEAD:
            self.calls += 1
            return _multihead(self, *args, **kwargs)
        if func in SOFTMAX:
            self.calls += 1
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
        raise Refused(f"{watching.name} attends causally, which TokenMixup does not support")
    if attn_mask is not None:
        missing = query.ndim - attn_mask.ndim
        attn_mask = attn_mask[(None,) * missing]  # b|1 .. q k, as many dimensions as the query
    if scale is None:  # of the map; `options` have what was given
        scale = query.shape[-1] ** -0.5
    seen = AttentionMap(_noted(query), _noted(key), _noted(attn_mask), scale)
    attended = Attended(key, value)
    if watching.note(seen, attended) and watching.memory is not None:
        attended = watching.memory.after(attended)
        attn_mask = _with_columns(attn_mask, watching.memory.indices)
    return FUSED(query, *attended, attn_mask, **options)


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
    return torch.cat([mask, at_places(mask, memory_indices, dim=-1)], dim=-1)


def at_places(x: Tensor, indices: Tensor, dim: int) -> Tensor:
    """Returns what is at the places `b m` of one of the last two dimensions: `b .. n e`."""
    missing = x.ndim - 2
    index = indices[(slice(None), *(None,) * missing)]  # b 1 .. m
    if dim == -2:
        index = index.mT
    return x.take_along_dim(index, dim=dim)


def _softmax(
    watching: Watching,
    func: Callable[..., Any],
    input: Tensor,
    dim: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Runs a softmax; one over all tokens returns a map, which is noted.

    But in the run on a memory: it has no keys and values.
    """
    out: Tensor = func(input, dim, *args, **kwargs)
    is_map = dim in (-1, input.ndim - 1) and watching.is_map(input.shape)
    if is_map and not watching.of_memory:
        watching.note(AttentionMap(weights=_noted(out)), None)
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
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Runs multi_head_attention_forward, `n b d`, which hides its own calls, and notes its map.

    Its keys and values are tokens, which it projects one by one, and so are those of a memory.
    """
    if watching.is_map(torch.Size([query.shape[1], num_heads, len(query), len(key)])):
        has_further_keys = bias_k is not None or add_zero_attn
        has_mask = key_padding_mask is not None or attn_mask is not None
        if in_proj_weight is None or has_further_keys or has_mask:
            raise Refused(
                f"{watching.name}: TokenMixup supports torch's multi-head attention without a "
                "mask, bias_k, bias_v and add_zero_attn, and with one width of queries, keys and "
                "values"
            )
        seen = None
        if watching.keeps_map:
            seen = _map_of_multihead(query, key, num_heads, in_proj_weight, in_proj_bias)
        attended = Attended(key.transpose(0, 1), value.transpose(0, 1))
        if watching.note(seen, attended) and watching.memory is not None:
            attended = watching.memory.after(attended)
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
