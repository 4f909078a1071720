"""Sees the softmax attention that a block computes, whatever the block consists of.

A block runs under `Watching`, which sees its calls of scaled_dot_product_attention, softmax and
multi_head_attention_forward. Those over all tokens of the block are its attention maps. VTM's
memory is further tokens, behind the block's own n; what they would ask for is left out.

Letters: b batch, h heads, n queries, m keys, e head width, d width.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tokenmixup.assignment import HAS_TRITON
from tokenmixup.contexts import without_autocast

FUSED = torch._C._nn.scaled_dot_product_attention  # that of `F` may be somebody's wrapper
MULTIHEAD = F.multi_head_attention_forward
SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)
OWN_CHECKPOINTING = (
    "runs without gradients or under the model's own gradient checkpointing, which would rerun it "
    "without TokenMixup: use attach(..., checkpoint_blocks=True)"
)
HALF = (torch.float16, torch.bfloat16)
HELD_KEYS = 2**15  # numbers of a head's keys, in powers of two, that the kernel holds: 64 KiB


@dataclass
class AttentionMap:
    """An attention map, `b h .. n m`, given by queries and keys or by its weights."""

    q: Tensor | None = None  # b h .. n e
    k: Tensor | None = None  # b h .. m e
    bias: Tensor | None = None  # added to the scaled scores; or bool, the scores that count
    scale: float = 1.0  # of the scores
    weights: Tensor | None = None  # b h .. n m, after softmax

    def rows(self, rows: int | None = None, keys: int | None = None) -> Tensor:
        """Returns the map of the first queries over the first keys, each row with the sum 1.

        It is computed in float32 at least, whose scores float16 could not hold.
        """
        if self.weights is not None:
            return _part(self.weights, rows, keys)
        assert self.q is not None and self.k is not None, "given if there are no weights"
        q, k = self.q[..., :rows, :], self.k[..., :keys, :]
        # decorated, a method could not be compiled by torch 2.11
        with torch.no_grad(), without_autocast(q.device.type):
            scores = _scores(q, k, self.scale)
            if self.bias is None:
                return scores.softmax(dim=-1)
            bias = self.bias[..., :keys]
            if bias.shape[-2] > 1:
                bias = bias[..., :rows, :]
            if bias.dtype == torch.bool:
                scores = scores.masked_fill(~bias, -torch.inf)
            else:
                scores = scores + bias
            sees_none = scores.isneginf().all(dim=-1, keepdim=True)
            return scores.softmax(dim=-1).masked_fill(sees_none, 0)  # as fused attention

    def received(self, rows: int | None = None, keys: int | None = None) -> Tensor:
        """Returns what each key receives, `b .. m`: the mean over heads and queries."""
        if self.q is not None and self.k is not None and self.bias is None:
            q, k = self.q[..., :rows, :], self.k[..., :keys, :]
            if _has_kernel(q, k):
                return received_on_device(q, k, self.scale)
        return self.rows(rows, keys).mean(dim=(1, -2))


def _part(weights: Tensor, rows: int | None, keys: int | None) -> Tensor:
    """Returns the first rows and columns of a map, with the sum 1, in float32 at least."""
    part = weights[..., :rows, :keys]
    part = part.to(torch.promote_types(part.dtype, torch.float32))
    if keys is None or keys == weights.shape[-1]:
        return part
    return part / part.sum(dim=-1, keepdim=True)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Returns scaled products of queries and keys, `b h .. n m`, in float32 at least."""
    if q.shape[1] != k.shape[1]:  # heads share their keys
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    exact = torch.promote_types(q.dtype, torch.float32)
    queries, keys = (x.to(exact).flatten(0, -3) for x in (q, k))
    empty = q.new_empty((), dtype=exact)
    scores = torch.baddbmm(empty, queries, keys.mT, beta=0, alpha=scale)
    return scores.unflatten(0, q.shape[:-2])


def _has_kernel(q: Tensor, k: Tensor) -> bool:
    """Whether one kernel takes these: float16 or bf16, `b h n e`, and a head's keys fit into it."""
    if not (q.is_cuda and HAS_TRITON and q.ndim == 4 and q.shape[:2] == k.shape[:2]):
        return False
    held = int(2 ** (math.ceil(math.log2(k.shape[2])) + math.ceil(math.log2(k.shape[3]))))
    return q.dtype in HALF and held <= HELD_KEYS


@torch.library.custom_op("tokenmixup::received", mutates_args=())
def received_on_device(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """What keys receive, by one kernel: `b h n e`, `b h m e` -> `b m` float32."""
    from tokenmixup.attention_kernel import received

    with torch.cuda.device(q.device):  # Triton launches on the current one
        return received(q, k, scale)


@received_on_device.register_fake
def _(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return k.new_empty(len(k), k.shape[2], dtype=torch.float32)


class MapSeen(BaseException):
    """Ends the run of a block whose map is all that was asked for; no error, so no fallback."""


def graph_now() -> tuple[bool, Any]:
    """Returns whether gradients are recorded, and by which checkpoint (of torch, not reentrant)."""
    if torch.compiler.is_compiling():  # it reruns rightly
        return torch.is_grad_enabled(), None
    packing = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if packing is not None and packing[0].__module__ == "torch.utils.checkpoint":
        return torch.is_grad_enabled(), packing[0]
    return torch.is_grad_enabled(), None


@dataclass(eq=False)
class Watching(TorchFunctionMode):
    """While it is entered, sees the attention maps of the block that runs."""

    name: str  # of the block
    b: int
    n: int  # its own tokens
    any_shape: bool = False  # whether maps of windows, or with fewer keys, count too
    keeps_map: bool = True  # the first one
    only_map: bool = False  # the block is left as soon as it is known
    memory: Tensor | None = None  # b m, the place of each token of a memory among the n
    hides_memory: bool = False  # from every query, for the proof
    count: int = 0  # of maps
    map: AttentionMap | None = None
    graph: Any = field(default_factory=graph_now)

    def total(self) -> int:
        """The number of tokens, with those of a memory. (Compiled, a mode has no properties.)"""
        if self.memory is None:
            return self.n
        return self.n + self.memory.shape[1]

    def is_map(self, shape: torch.Size) -> bool:
        """Whether `b .. n m` is the shape of a map over all tokens."""
        if len(shape) < 3:
            return False
        over_all = shape[0] == self.b and shape[-2] == shape[-1] == self.total()
        return over_all or self.any_shape

    def is_hidden(self, device: torch.device) -> Tensor:
        """Which of all tokens nobody may see, `n + m` bool."""
        return torch.arange(self.total(), device=device) >= self.n

    def note(self, found: AttentionMap | None) -> None:
        """Counts a map, and keeps it if it is asked for.

        Raises ValueError if it has a memory and will be run again, when nobody watches.
        """
        if self.memory is not None and self.graph != graph_now():
            raise ValueError(f"{self.name} {OWN_CHECKPOINTING}")
        self.count += 1
        if self.keeps_map and self.map is None:
            self.map = found
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
        found = self.checked()
        assert found is not None, "it was asked for"
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is FUSED:
            return _fused(self, *args, **kwargs)
        if func is MULTIHEAD:
            return _multihead(self, *args, **kwargs)
        if func is F.dropout and self.memory is not None:
            return _dropout(self, *args, **kwargs)
        if func in SOFTMAX:
            return _softmax(self, func, *args, **kwargs)
        return func(*args, **kwargs)


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
    more: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    if not at.is_map(query.shape[:-1] + key.shape[-2:-1]):
        return FUSED(query, key, value, attn_mask, **more)
    bias = attn_mask
    if bias is not None:
        bias = bias[(None,) * (query.ndim - bias.ndim)]
    if at.memory is not None:
        query, bias = query[..., : at.n, :], _with_columns(bias, at)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    at.note(AttentionMap(_with_heads(query), _with_heads(key), _with_heads(bias), scale))
    if at.hides_memory:
        key, value = key[..., : at.n, :], value[..., : at.n, :]
        bias = None if bias is None else bias[..., : at.n]
    return _padded(FUSED(query, key, value, bias, **more), at)


def _padded(x: Tensor, at: Watching) -> Tensor:
    """Appends rows of zeros for the tokens of a memory, which ask nothing: `.. n d`."""
    if at.memory is None:
        return x
    return F.pad(x, (0, 0, 0, at.total() - at.n))


def _with_heads(x: Tensor | None) -> Any:
    """Of one head, which may have no dimension of its own: `b n ..` -> `b 1 n ..`; detached."""
    if x is None:
        return None
    if x.ndim > 3:
        return x.detach()
    return x.detach()[:, None]


def _with_columns(bias: Tensor | None, at: Watching) -> Tensor | None:
    """Appends to the bias of n keys, `b|1 .. n|1 n`, that of the memory at its places."""
    if bias is None or at.memory is None:
        return None
    if bias.shape[-1] != at.n:  # it has the columns of all tokens
        return bias[..., : at.n, :]
    bias = bias.expand((at.b, *bias.shape[1:]))
    places = at.memory
    while places.ndim < bias.ndim:
        places = places[:, None]
    return torch.cat([bias, bias.take_along_dim(places, dim=-1)], dim=-1)


def _softmax(at: Watching, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Runs a softmax; one over all tokens returns a map, which is noted."""
    dim = args[0] if args else kwargs.get("dim", -1)
    is_map = dim in (-1, input.ndim - 1) and at.is_map(input.shape)
    if is_map and at.hides_memory:
        input = input.masked_fill(at.is_hidden(input.device), -torch.inf)
    out = func(input, *args, **kwargs)
    if is_map:
        at.note(AttentionMap(weights=_with_heads(out)))
    return out


def _dropout(
    at: Watching, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Draws for the block's own tokens alone, once its map is seen: a memory asks nothing.

    What is run again in the backward pass, when nobody watches, draws as it will then.
    """
    is_of_tokens = input.ndim >= 3 and input.shape[-2] == at.total()
    if not is_of_tokens or at.count == 0 or at.graph != graph_now():
        return F.dropout(input, p, training, inplace)
    return _padded(F.dropout(input[..., : at.n, :], p, training, inplace), at)


def _multihead(at: Watching, *args: Any, **kwargs: Any) -> Any:
    """Runs multi_head_attention_forward, `n b d`, which hides its own calls, and notes its map."""
    query, key, heads = args[0], args[1], args[4]
    if at.is_map(torch.Size([query.shape[1], heads, len(query), len(key)])):
        _check_multihead(args, kwargs)
        found = None
        if at.keeps_map:
            found = _map_of_multihead(query, key, heads, weight=args[5], bias=args[6])
        at.note(found)
        if at.hides_memory:
            kwargs = {**kwargs, "attn_mask": at.is_hidden(query.device).expand(len(query), -1)}
    return MULTIHEAD(*args, **kwargs)


def _check_multihead(args: Any, kwargs: Any) -> None:
    """Raises ValueError for arguments that change the map."""
    weight, bias_k, adds_zeros = args[5], args[7], args[9]
    masks = (kwargs.get("key_padding_mask"), kwargs.get("attn_mask"))
    has_mask = any(mask is not None for mask in masks)
    if weight is None or bias_k is not None or adds_zeros or has_mask:
        raise ValueError(
            "TokenMixup supports torch's multi-head attention without a mask, further keys, and "
            "separate widths"
        )


def _map_of_multihead(
    query: Tensor, key: Tensor, heads: int, weight: Tensor, bias: Tensor | None
) -> AttentionMap:
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    both = map(F.linear, (query, key), weight.chunk(3), biases)
    q, k = (x.detach().unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for x in both)
    return AttentionMap(q, k, scale=q.shape[-1] ** -0.5)
