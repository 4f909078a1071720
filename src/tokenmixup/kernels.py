"""Kernels for CUDA of what else HTM computes: gains, saliency, label weights, exchange, figures.

Each does in one launch what functions of torch do in several; those, named in the docstrings, say
what is computed, and the tests compare both.

Letters: b batch, n tokens with prefix, t spatial tokens, d width, h heads, e head width, m keys,
k layers of HTM.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SCORES = 2**14  # of a tile


@triton.jit
def _gain(saliency_ptr, gain_ptr, b, t, RHO: tl.constexpr, S: tl.constexpr, T: tl.constexpr):
    receiver = tl.program_id(0) * S + tl.arange(0, S)
    donor = tl.program_id(1) * S + tl.arange(0, S)
    gain = tl.zeros([S, S], tl.float64)
    for first in range(0, t, T):
        token = first + tl.arange(0, T)
        own = tl.load(
            saliency_ptr + receiver[:, None] * t + token[None, :],
            (receiver < b)[:, None] & (token < t)[None, :],
            float("inf"),  # so that a token that is none gains nothing
        ).to(tl.float64)
        offered = tl.load(
            saliency_ptr + donor[:, None] * t + token[None, :],
            (donor < b)[:, None] & (token < t)[None, :],
            0.0,
        ).to(tl.float64)
        surplus = offered[None, :, :] - own[:, None, :] - RHO
        # written so that nan stays nan
        gain += tl.sum(tl.where(surplus <= 0, 0.0, surplus), 2)
    gain = tl.where(receiver[:, None] == donor[None, :], 0.0, gain)
    inside = (receiver < b)[:, None] & (donor < b)[None, :]
    tl.store(gain_ptr + receiver[:, None] * b + donor[None, :], gain, inside)


def gain(saliency: Tensor, rho: float) -> Tensor:
    """`assignment.gain_matrix` for finite rho: `b t` float32 -> `b b` float64."""
    b, t = saliency.shape
    out = saliency.new_empty(b, b, dtype=torch.float64)
    size = triton.cdiv(b, 16)
    _gain[size, size](saliency.contiguous(), out, b, t, float(rho), 16, 16, num_warps=4)
    return out


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
    M: tl.constexpr,
    E: tl.constexpr,
):
    sample, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e, m = tl.arange(0, E), tl.arange(0, M)
    k_tile = k_ptr + sample * k_b + head * k_h + m[None, :] * k_n + e[:, None]
    k = tl.load(k_tile, (m < keys)[None, :] & (e < width)[:, None], 0.0)  # e m
    total = tl.zeros([M], tl.float32)
    for first in range(0, rows, R):
        row = first + tl.arange(0, R)
        q_tile = q_ptr + sample * q_b + head * q_h + row[:, None] * q_n + e[None, :]
        q = tl.load(q_tile, (row < rows)[:, None] & (e < width)[None, :], 0.0)  # r e
        score = tl.where((m < keys)[None, :], tl.dot(q, k) * scale, -float("inf"))
        share = tl.exp(score - tl.max(score, 1)[:, None])
        share = share / tl.sum(share, 1)[:, None]
        total += tl.sum(tl.where((row < rows)[:, None], share, 0.0), 0)
    out = out_ptr + (sample * heads + head) * keys + m
    tl.store(out, total / (rows * heads), m < keys)


def received(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """`attention.received` without terms of positions: `b h n e`, `b h m e` -> `b m` float32.

    The products of float16 and bf16 are summed in float32, so no score overflows.
    """
    b, h, rows, width = q.shape
    keys = k.shape[2]
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    out = q.new_empty(b, h, keys, dtype=torch.float32)
    m, e = (max(16, triton.next_power_of_2(x)) for x in (keys, width))
    r = max(16, min(triton.next_power_of_2(rows), 64, SCORES // m))
    strides = (*q.stride()[:3], *k.stride()[:3])
    _received[b, h](q, k, out, h, rows, keys, width, scale, *strides, r, m, e, num_warps=8)
    return out.sum(dim=1)


@triton.jit
def _ratio(saliency_ptr, mask_ptr, out_ptr, t, T: tl.constexpr):
    sample, token = tl.program_id(0), tl.arange(0, T)
    place = sample.to(tl.int64) * t + token
    saliency = tl.load(saliency_ptr + place, token < t, 0.0)
    taken = tl.load(mask_ptr + place, token < t, 0) != 0
    ratio = tl.sum(tl.where(taken, 0.0, saliency), 0) / tl.sum(saliency, 0)
    tl.store(out_ptr + sample, tl.where(ratio <= 1, ratio, 1.0))


def ratio(saliency: Tensor, mask: Tensor) -> Tensor:
    """`horizontal.saliency_ratio`: `b t` float32, tokens taken `b t` bool -> `b 1`."""
    b, t = saliency.shape
    out = saliency.new_empty(b, 1)
    size = triton.next_power_of_2(t)
    _ratio[b,](saliency.contiguous(), mask.contiguous(), out, t, size, num_warps=4)
    return out


@triton.jit
def _totals(easy_ptr, mask_ptr, gain_ptr, difficulty_ptr, out_ptr, b, tokens, kb, S: tl.constexpr):
    place = tl.arange(0, S)
    zero = tl.zeros([S], tl.float32)
    easy, replaced, gain, nats = zero, zero, zero, zero
    largest = tl.full([S], -float("inf"), tl.float32)
    for first in range(0, b, S):
        inside = first + place < b
        easy += tl.load(easy_ptr + first + place, inside, 0).to(tl.float32)
    for first in range(0, kb, S):
        nats += tl.load(difficulty_ptr + first + place, first + place < kb, 0.0)
    for first in range(0, tokens, S):
        inside = first + place < tokens
        replaced += tl.load(mask_ptr + first + place, inside, 0).to(tl.float32)
        value = tl.load(gain_ptr + first + place, inside, -float("inf"))
        largest = tl.maximum(largest, value)
        gain += tl.where(inside, value, 0.0)
    total = tl.sum(gain, 0)
    tl.store(out_ptr, tl.sum(easy, 0))
    tl.store(out_ptr + 1, tl.sum(replaced, 0))
    tl.store(out_ptr + 2, tl.sum(nats, 0))
    tl.store(out_ptr + 3, total)
    is_finite = total - total == 0
    tl.store(out_ptr + 4, tl.where(is_finite, tl.max(largest, 0), total))


def totals(is_easy: Tensor, mask: Tensor, gain: Tensor, difficulty: Tensor) -> Tensor:
    """`output.totals_by_sums`: `b` bool, `b t` bool, `b t` float32, `(k b)` float32 -> `5`."""
    out = gain.new_empty(5)
    given = (x.contiguous() for x in (is_easy, mask, gain, difficulty))
    counts = len(is_easy), mask.numel(), difficulty.numel()
    _totals[1,](*given, out, *counts, 4096, num_warps=16)
    return out


@triton.jit
def _exchange(x_ptr, donor_ptr, mask_ptr, out_ptr, n, t, d, N: tl.constexpr, D: tl.constexpr):
    sample, donor = tl.program_id(0), tl.load(donor_ptr + tl.program_id(0))
    token, column = tl.program_id(1) * N + tl.arange(0, N), tl.arange(0, D)
    spatial = token - (n - t)
    taken = tl.load(mask_ptr + sample * t + spatial, (spatial >= 0) & (token < n), 0) != 0
    source = tl.where(taken & (donor >= 0), donor, sample).to(tl.int64)
    for first in range(0, d, D):
        inside = (token < n)[:, None] & (first + column < d)[None, :]
        place = token[:, None] * d + first + column[None, :]
        x = tl.load(x_ptr + source[:, None] * n * d + place, inside)
        tl.store(out_ptr + sample.to(tl.int64) * n * d + place, x, inside)


@triton.jit
def _exchange_backward(
    grad_ptr,
    donor_ptr,
    mask_ptr,
    out_ptr,
    b,
    n,
    t,
    d,
    B: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    sample, donor = tl.program_id(0), tl.load(donor_ptr + tl.program_id(0))
    token, column = tl.program_id(1) * N + tl.arange(0, N), tl.arange(0, D)
    samples = tl.arange(0, B)
    donors = tl.load(donor_ptr + samples, samples < b, -1)
    takes = (donors == sample) & (samples != sample)
    spatial = token - (n - t)
    is_spatial = (spatial >= 0) & (token < n)
    replaced = tl.load(mask_ptr + sample * t + spatial, is_spatial, 0) != 0
    stays = tl.where((donor >= 0) & (donor != sample), replaced, 0) == 0
    for first in range(0, d, D):
        inside = (token < n)[:, None] & (first + column < d)[None, :]
        place = token[:, None] * d + first + column[None, :]
        own = tl.load(grad_ptr + sample.to(tl.int64) * n * d + place, inside & stays[:, None], 0.0)
        grad = own.to(tl.float32)
        receiver = tl.min(tl.where(takes, samples, B), 0)
        while receiver < b:  # once, unless a rule lets several take from one donor
            taken = tl.load(mask_ptr + receiver * t + spatial, is_spatial, 0) != 0
            start = receiver.to(tl.int64) * n * d
            other = tl.load(grad_ptr + start + place, inside & taken[:, None], 0.0)
            grad += other.to(tl.float32)
            receiver = tl.min(tl.where(takes & (samples > receiver), samples, B), 0)
        tl.store(out_ptr + sample.to(tl.int64) * n * d + place, grad, inside)


def _tiles(x: Tensor) -> tuple[tuple[int, int], int, int]:
    """The grid over samples and tokens of `b n d`, and the tokens and columns of a tile."""
    b, n, d = x.shape
    columns = min(triton.next_power_of_2(d), 512)
    tokens = max(1, 4096 // columns)
    return (b, triton.cdiv(n, tokens)), tokens, columns


def exchange(x: Tensor, donor: Tensor, mask: Tensor) -> Tensor:
    """`horizontal.exchanged`: `b n d`, donors `b` int64, tokens to take from them `b t` bool."""
    x, (_, n, d) = x.contiguous(), x.shape
    out = torch.empty_like(x)
    grid, tokens, columns = _tiles(x)
    _exchange[grid](x, donor, mask, out, n, mask.shape[1], d, tokens, columns, num_warps=4)
    return out


def exchange_backward(grad: Tensor, donor: Tensor, mask: Tensor) -> Tensor:
    """The gradient of `exchange` by `x`, gathered: every token adds up who has read it."""
    grad, (b, n, d) = grad.contiguous(), grad.shape
    out = torch.empty_like(grad)
    grid, tokens, columns = _tiles(grad)
    size = triton.next_power_of_2(b)
    _exchange_backward[grid](
        grad, donor, mask, out, b, n, mask.shape[1], d, size, tokens, columns, num_warps=4
    )
    return out
