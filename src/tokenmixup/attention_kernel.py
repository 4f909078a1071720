"""What keys receive of attention, on a GPU: the map never leaves the processor.

Letters: b batch, h heads, q queries, k keys, e head width; R, K, E powers of two: the rows (of
queries), keys and width of a tile.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

SCORES = 2**14  # of a tile
WARPS = 8


@triton.jit
def _received(
    q_ptr,
    k_ptr,
    out_ptr,
    heads,
    rows,
    keys,
    width,
    scale,
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    R: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
):
    """The share of one head: each of its queries gives 1 in all. Scores count in powers of two."""
    sample, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e, key = tl.arange(0, E), tl.arange(0, K)
    k_tile = k_ptr + sample * k_b + head * k_h + key[None, :] * k_n + e[:, None]
    k = tl.load(k_tile, (key < keys)[None, :] & (e < width)[:, None], 0.0)  # E K
    total = tl.zeros([R, K], tl.float32)  # summed over its rows at the end, once
    for first in range(0, rows, R):
        row = first + tl.arange(0, R)
        q_tile = q_ptr + sample * q_b + head * q_h + row[:, None] * q_n + e[None, :]
        q = tl.load(q_tile, (row < rows)[:, None] & (e < width)[None, :], 0.0)  # R E
        score = tl.where((key < keys)[None, :], tl.dot(q, k) * scale, -float("inf"))
        power = tl.exp2(score - tl.max(score, 1)[:, None])
        weight = tl.where(row < rows, 1.0 / tl.sum(power, 1), 0.0)
        total += power * weight[:, None]
    out = out_ptr + (sample * heads + head) * keys + key
    tl.store(out, tl.sum(total, 0) / (rows * heads), key < keys)


def received(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """What keys receive, the mean over heads and queries: `b h q e`, `b h k e` -> `b k` float32.

    The products of float16 and bf16 are summed in float32, so no score overflows.
    """
    b, h, rows, width = q.shape
    keys = k.shape[2]
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    out = q.new_empty(b, h, keys, dtype=torch.float32)
    K, E = (max(16, triton.next_power_of_2(x)) for x in (keys, width))
    R = max(16, min(triton.next_power_of_2(rows), 64, SCORES // K))
    strides = (*q.stride()[:3], *k.stride()[:3])
    scale *= math.log2(math.e)  # powers of two instead of e
    _received[b, h](q, k, out, h, rows, keys, width, scale, *strides, R, K, E, num_warps=WARPS)
    return out.sum(dim=1)
