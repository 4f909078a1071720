"""An attention map: its rows, and what each key receives in it.

Letters: b batch, h heads, n queries, m keys, e head width.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmixup.assignment import HAS_TRITON
from tokenmixup.contexts import without_autocast

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
    keys = math.ceil(math.log2(k.shape[2]))
    width = math.ceil(math.log2(k.shape[3]))
    return q.dtype in HALF and 2 ** (keys + width) <= HELD_KEYS


@torch.library.custom_op("tokenmixup::received", mutates_args=())
def received_on_device(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """What keys receive, by one kernel: `b h n e`, `b h m e` -> `b m` float32."""
    from tokenmixup.attention_kernel import received

    with torch.cuda.device(q.device):  # Triton launches on the current one
        return received(q, k, scale)


@received_on_device.register_fake
def _(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return k.new_empty(len(k), k.shape[2], dtype=torch.float32)
