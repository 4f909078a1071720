"""Sees the softmax attention that a block computes, whatever the block consists of.

A block runs under `Watching`, which sees its calls of scaled_dot_product_attention, softmax and
multi_head_attention_forward. Those over all tokens of the block are its attention maps. VTM's
memory is further tokens, behind the block's own n; what they would ask for is left out.

Letters: b batch, h heads, n queries, m keys, e head width, d width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tokenmixup.attention import AttentionMap

FUSED = torch._C._nn.scaled_dot_product_attention  # that of `F` may be somebody's wrapper
MULTIHEAD = F.multi_head_attention_forward
SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)
OWN_CHECKPOINTING = (
    "runs without gradients or under the model's own gradient checkpointing, which would rerun it "
    "without TokenMixup: use attach(..., checkpoint_blocks=True)"
)


class MapSeen(BaseException):
    """Ends the run of a block whose map is all that was asked for; no error, so no fallback."""


Recording = tuple[bool, Any]  # whether gradients are recorded, and the checkpoint that reruns


def recording_now() -> Recording:
    """Returns how operations are recorded; of checkpoints, by torch's that are not reentrant."""
    is_recorded = torch.is_grad_enabled()
    if torch.compiler.is_compiling():  # it reruns rightly
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
    any_shape: bool = False  # whether maps of windows, or with fewer keys, count too
    keeps_map: bool = True  # the first one
    only_map: bool = False  # the block is left as soon as it is known
    memory_indices: Tensor | None = None  # b m, of which of the n a memory's tokens are copies
    hides_memory: bool = False  # from every query, for the proof
    count: int = 0  # of maps
    map: AttentionMap | None = None
    recording: Recording = field(default_factory=recording_now)

    def total(self) -> int:
        """The number of tokens, with those of a memory. (Compiled, a mode has no properties.)"""
        if self.memory_indices is None:
            return self.n
        return self.n + self.memory_indices.shape[1]

    def is_map(self, shape: torch.Size) -> bool:
        """Whether `b .. n m` is the shape of a map over all tokens."""
        if len(shape) < 3:
            return False
        over_all = shape[0] == self.b and shape[-2] == shape[-1] == self.total()
        return over_all or self.any_shape

    def is_hidden(self, device: torch.device) -> Tensor:
        """Which of all tokens nobody may see, `n + m` bool."""
        return torch.arange(self.total(), device=device) >= self.n

    def note(self, seen: AttentionMap | None) -> None:
        """Counts a map, and keeps it if it is asked for.

        Raises ValueError if it has a memory and will be run again, when nobody watches.
        """
        if self.memory_indices is not None and self.recording != recording_now():
            raise ValueError(f"{self.name} {OWN_CHECKPOINTING}")
        self.count += 1
        if self.keeps_map and self.map is None:
            self.map = seen
        if self.only_map:
            raise MapSeen

    def checked(self) -> AttentionMap | None:
        """Returns the map, None if it was not kept. Raises ValueError unless there was one map."""
        if self.count != 1:
            found = f"computes {self.count} attention maps over its tokens"
            raise ValueError(f"{self.name} {found}, must be 1")
        return self.map

    def kept(self) -> AttentionMap:
        """Returns the map of a run that keeps it. Raises ValueError unless there was one map."""
        seen = self.checked()
        assert seen is not None, "it was asked for"
        return seen

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is FUSED:
            return _fused(self, *args, **kwargs)
        if func is MULTIHEAD:
            return _multihead(self, *args, **kwargs)
        if func is F.dropout and self.memory_indices is not None:
            return _dropout(self, *args, **kwargs)
        if func in SOFTMAX:
            return _softmax(self, func, *args, **kwargs)
        return func(*args, **kwargs)


# Arguments below have the names of torch's functions.


def _fused(
    at: Watching,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attends as scaled_dot_product_attention; only the block's own tokens ask the memory."""
    if is_causal:
        raise ValueError("TokenMixup does not support causal attention")
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    if not at.is_map(query.shape[:-1] + key.shape[-2:-1]):
        return FUSED(query, key, value, attn_mask, **options)
    bias = None
    if attn_mask is not None:
        bias = attn_mask[(None,) * (query.ndim - attn_mask.ndim)]  # 1 .. n m
    if at.memory_indices is not None:
        query = query[..., : at.n, :]
        bias = _with_columns(bias, at.n, at.memory_indices)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    at.note(AttentionMap(_with_heads(query), _with_heads(key), _with_heads(bias), scale))
    if at.hides_memory:
        key = key[..., : at.n, :]
        value = value[..., : at.n, :]
        bias = None if bias is None else bias[..., : at.n]
    return _padded(FUSED(query, key, value, bias, **options), at)


def _padded(x: Tensor, at: Watching) -> Tensor:
    """Appends rows of zeros for the tokens of a memory, which ask nothing: `.. n d`."""
    if at.memory_indices is None:
        return x
    return F.pad(x, (0, 0, 0, at.total() - at.n))


def _with_heads(x: Tensor | None) -> Tensor | None:
    """Of one head, which may have no dimension of its own: `b n ..` -> `b 1 n ..`; detached."""
    if x is None:
        return None
    if x.ndim > 3:
        return x.detach()
    return x.detach()[:, None]


def _with_columns(bias: Tensor | None, n: int, memory_indices: Tensor) -> Tensor | None:
    """Appends to the bias of n keys, `b|1 .. n|1 n`, the columns that a memory's tokens had."""
    if bias is None:
        return None
    if bias.shape[-1] != n:  # it has the columns of all tokens
        return bias[..., :n, :]
    bias = bias.expand(len(memory_indices), *bias.shape[1:])
    while memory_indices.ndim < bias.ndim:
        memory_indices = memory_indices[:, None]
    return torch.cat([bias, bias.take_along_dim(memory_indices, dim=-1)], dim=-1)


def _softmax(
    at: Watching,
    func: Callable[..., Any],
    input: Tensor,
    dim: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Runs a softmax; one over all tokens returns a map, which is noted."""
    is_map = dim in (-1, input.ndim - 1) and at.is_map(input.shape)
    if is_map and at.hides_memory:
        input = input.masked_fill(at.is_hidden(input.device), -torch.inf)
    out: Tensor = func(input, dim, *args, **kwargs)
    if is_map:
        at.note(AttentionMap(weights=_with_heads(out)))
    return out


def _dropout(
    at: Watching, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Draws for the block's own tokens alone, once its map is seen: a memory asks nothing.

    What is run again in the backward pass, when nobody watches, draws as it will then.
    """
    draws_for_tokens = p > 0 and input.ndim >= 3 and input.shape[-2] == at.total()
    if not draws_for_tokens or at.count == 0 or at.recording != recording_now():
        return F.dropout(input, p, training, inplace)
    return _padded(F.dropout(input[..., : at.n, :], p, training, inplace), at)


def _multihead(
    at: Watching,
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
    if at.is_map(torch.Size([query.shape[1], num_heads, len(query), len(key)])):
        has_further_keys = bias_k is not None or add_zero_attn
        has_mask = key_padding_mask is not None or attn_mask is not None
        if in_proj_weight is None or has_further_keys or has_mask:
            raise ValueError(
                "TokenMixup supports torch's multi-head attention without a mask, further keys, "
                "and separate widths"
            )
        seen = None
        if at.keeps_map:
            seen = _map_of_multihead(query, key, num_heads, in_proj_weight, in_proj_bias)
        at.note(seen)
        if at.hides_memory:
            attn_mask = at.is_hidden(query.device).expand(len(query), -1)
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
    """`weight`, `bias`: of the projections of queries, keys and values, one below another."""
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
