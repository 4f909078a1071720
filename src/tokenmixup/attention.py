"""An attention map: its rows, and what each key receives in it.

Letters: b batch, h heads, q queries, k keys, e head width.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmixup.assignment import HAS_TRITON
from tokenmixup.contexts import without_autocast

HALF = (torch.float16, torch.bfloat16)
# What the kernel holds of one head's keys: 64 KiB. In elements, keys x width, each of them rounded
# up to a power of two, 16 or more
HELD_KEYS = 2**15
WHOLE = 2**26  # weights of a map that is formed as a whole: 256 MiB in float32


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
        if q.ndim != 4 or q.shape[:3].numel() * self.k.shape[2] <= WHOLE:
            return self.probabilities(queries).mean(dim=(1, -2))
        received = q.new_zeros((), dtype=torch.float32)
        for head in range(q.shape[1]):  # the map of one at a time
            received = received + self._head(head).probabilities(queries).mean(dim=(1, -2))
        return received / q.shape[1]

    def _head(self, index: int) -> "AttentionMap":
        """Returns the map of one head, `b 1 q k`."""
        assert self.q is not None and self.k is not None
        of_keys = index * self.k.shape[1] // self.q.shape[1]  # heads share their keys
        q, k = self.q[:, index : index + 1], self.k[:, of_keys : of_keys + 1]
        mask = self.mask
        if mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
            mask = mask[:, index : index + 1]
        return AttentionMap(q, k, mask, self.scale)


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
