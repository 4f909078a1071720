"""Kernels for CUDA, each one launch, which the host does not wait for.

`received` is what keys receive of attention, whose map never leaves the processor.
`device_donors` is the optimal assignment. Gains become integers of at most 28 bits. Whatever
follows is exact and independent of the order of threads, so every run gives the same donors, whose
total gain is below the optimum by at most `easy samples x 2^-28` of the largest gain.

1. `_prices`: Sinkhorn's iterations in float32 guess what each donor is worth. Any start is right;
   a good one leaves little to the searches. Skipped if few samples are easy.
2. `_bid`: receivers without a donor bid for their best one and raise its price by what it is worth
   more than their second best. So a receiver's donor always is one of its best at these prices.
3. `_augment`: shortest augmenting paths for the remaining receivers (Jonker and Volgenant, 1987).
4. Donors that nobody takes have to be cheapest. If hard samples leave some that are not, a receiver
   without any gain, row `b`, takes the cheap ones, and searches free the others.

Letters: b batch, B the power of two from it on, R rows of a tile; rows receive, columns give. Of
attention: h heads, n queries, m keys, e head width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ONE = tl.constexpr(2**28)  # the largest gain; sums of four such numbers fit into 31 bits
FAR = tl.constexpr(2**31 - 1)
NEVER = tl.constexpr(-(2**30))  # worth of a column that is none
SMALLEST = tl.constexpr(1e-290)  # gains whose range is below are taken as equal
COOLING = tl.constexpr(0.3)
TILE = 2**13  # numbers that are processed together; more need registers that spill
ITERATIONS, BIDS, WARPS = 3, 4, 8  # fastest on an H200 for 64 to 504 samples
SCORES = 2**14  # of a tile of attention


@triton.jit
def _load(cost_ptr, first, b, B: tl.constexpr, R: tl.constexpr):
    """Integer gains of the rows from `first` on, `R B`, and the row numbers; 0 outside."""
    cols, row = tl.arange(0, B), first + tl.arange(0, R)
    return tl.load(cost_ptr + row[:, None] * B + cols[None, :], (row < b)[:, None], 0), row


@triton.jit
def _easy_gains(gain_ptr, easy_ptr, first, b, B: tl.constexpr, R: tl.constexpr):
    """Gains of the rows from `first` on, `R B` float64, where the row is of an easy sample."""
    cols, row = tl.arange(0, B), first + tl.arange(0, R)
    easy = tl.load(easy_ptr + row, row < b, 0) != 0
    used = easy[:, None] & (cols < b)[None, :]
    gain = tl.load(gain_ptr + row[:, None] * b + cols[None, :], used, 0.0)
    return gain.to(tl.float64), used, tl.sum(easy.to(tl.int32), 0)


@triton.jit
def _to_integers(gain_ptr, easy_ptr, cost_ptr, b, B: tl.constexpr, R: tl.constexpr):
    """Writes the gains as integers, `b+1 B`, zeros for hard samples and for row b.

    The smallest gain becomes 0, since every easy sample takes exactly one donor. Returns the number
    of easy samples, and whether their gains are finite.
    """
    cols = tl.arange(0, B)
    top, low = tl.full([B], -float("inf"), tl.float64), tl.full([B], float("inf"), tl.float64)
    wrong, easy_rows = tl.zeros([B], tl.int32), tl.full((), 0, tl.int32)
    for first in range(0, b, R):
        gain, used, easy = _easy_gains(gain_ptr, easy_ptr, first, b, B, R)
        wrong += tl.sum(((tl.abs(gain) < float("inf")) == 0).to(tl.int32), 0)  # nan too
        top = tl.maximum(top, tl.max(tl.where(used, gain, -float("inf")), 0))
        low = tl.minimum(low, tl.min(tl.where(used, gain, float("inf")), 0))
        easy_rows += easy
    least = tl.min(low, 0)
    span = tl.max(top, 0) - least
    finite = tl.sum(wrong, 0) == 0
    has_span = finite & (span > SMALLEST) & (span < float("inf"))
    scale = tl.where(has_span, 1.0 / tl.where(has_span, span, 1.0) * ONE, 0.0)
    least = tl.where(has_span, least, 0.0)
    for first in range(0, b + 1, R):
        gain, used, _ = _easy_gains(gain_ptr, easy_ptr, first, b, B, R)
        whole = tl.where(used & has_span, (gain - least) * scale + 0.5, 0.0).to(tl.int32)
        row = first + tl.arange(0, R)
        tl.store(cost_ptr + row[:, None] * B + cols[None, :], whole, (row <= b)[:, None])
    tl.debug_barrier()
    return easy_rows, finite


@triton.jit
def _regrets(cost_ptr, price, first, b, B: tl.constexpr, R: tl.constexpr):
    """What each donor is worth less than the row's best one at these prices, `R B` float32 <= 0."""
    cols = tl.arange(0, B)
    whole, row = _load(cost_ptr, first, b, B, R)
    inside = (row < b)[:, None] & (cols < b)[None, :]
    worth = tl.where(inside, whole.to(tl.float32) / ONE - price[None, :], -4.0)
    return tl.where(inside, worth - tl.max(worth, 1)[:, None], 0.0), inside, row


@triton.jit
def _prices(cost_ptr, kernel_ptr, b, easy_rows, B: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """Guesses the dual values of the donors, `B` integers in 0..ONE, by N iterations in each phase.

    Maximises gain and entropy (Cuturi, 2013) at falling temperatures: 20, 6, 1.8 and 0.5 % of the
    mean regret. Lowered until as many prices are 0 as donors stay without a receiver.
    """
    cols = tl.arange(0, B)
    price = tl.zeros([B], tl.float32)
    for first in range(0, b, R):  # at first the largest gain
        whole, _ = _load(cost_ptr, first, b, B, R)
        price = tl.maximum(price, tl.max(whole, 0).to(tl.float32) / ONE)
    share = tl.full((), 0.2, tl.float32)
    for _phase in range(4):
        regret = tl.zeros([B], tl.float32)
        for first in range(0, b, R):
            worth, _, _ = _regrets(cost_ptr, price, first, b, B, R)
            regret -= tl.sum(worth, 0)
        heat = tl.maximum(share * tl.sum(regret, 0) / b / b, 1e-30)
        share *= COOLING
        for first in range(0, b, R):
            worth, inside, row = _regrets(cost_ptr, price, first, b, B, R)
            kernel = tl.where(inside, tl.exp(tl.maximum(worth / heat, -40.0)), 0.0)  # in range
            tl.store(kernel_ptr + row[:, None] * B + cols[None, :], kernel)
        tl.debug_barrier()
        factor = tl.full([B], 1.0, tl.float32)
        for _ in range(N):
            wanted = tl.zeros([B], tl.float32)
            for first in range(0, b, R):
                row = first + tl.arange(0, R)
                kernel = tl.load(kernel_ptr + row[:, None] * B + cols[None, :])
                total = tl.sum(kernel * factor[None, :], 1)
                weight = tl.where(row < b, 1.0 / tl.where(row < b, total, 1.0), 0.0)
                wanted += tl.sum(kernel * weight[:, None], 0)
            factor = 1.0 / tl.minimum(tl.maximum(wanted, 1e-30), 1e30)
        price -= heat * tl.log(factor)
        tl.debug_barrier()
    whole = (tl.minimum(tl.maximum(price, -3.5), 3.5) * ONE).to(tl.int32)
    low = tl.min(tl.where(cols < b, whole, FAR), 0)
    high = tl.max(tl.where(cols < b, whole, -FAR), 0)
    free = tl.maximum(b - easy_rows, 1)
    while low < high:  # bisects for the price that `free` donors do not exceed
        middle = low + (high - low) // 2
        enough = tl.sum(((whole <= middle) & (cols < b)).to(tl.int32), 0) >= free
        low = tl.where(enough, low, middle + 1)
        high = tl.where(enough, middle, high)
    return tl.minimum(tl.maximum(whole - low, 0), ONE)


@triton.jit
def _bid(cost_ptr, easy_ptr, price, owner, b, B: tl.constexpr, R: tl.constexpr):
    """Lets every waiting receiver bid once; returns prices, owners and the number of moves."""
    cols = tl.arange(0, B)
    raised, winner = tl.full([B], -1, tl.int32), tl.full([B], -1, tl.int32)
    for first in range(0, b, R):
        whole, row = _load(cost_ptr, first, b, B, R)
        has = tl.max((owner[None, :] == row[:, None]).to(tl.int32), 1) > 0
        waits = (tl.load(easy_ptr + row, row < b, 0) != 0) & (has == 0)
        worth = tl.where((cols < b)[None, :], whole - price[None, :], NEVER)
        best = tl.max(worth, 1)
        place = tl.min(tl.where(worth == best[:, None], cols[None, :], B), 1)
        here = cols[None, :] == place[:, None]
        lead = best - tl.max(tl.where(here, NEVER, worth), 1)
        bid = tl.where(here & waits[:, None], tl.minimum(lead, ONE)[:, None], -1)
        highest = tl.max(bid, 0)
        who = tl.min(tl.where((bid == highest[None, :]) & (bid >= 0), row[:, None], FAR), 0)
        winner = tl.where(highest > raised, who, winner)
        raised = tl.maximum(raised, highest)
    # a bid that raises no price takes a donor from nobody, so that bids end
    moves = (raised > 0) | ((raised == 0) & (owner < 0))
    owner = tl.where(moves, winner, owner)
    return price + tl.where(moves, raised, 0), owner, tl.sum(moves.to(tl.int32), 0)


@triton.jit
def _augment(cost_ptr, root, price, owner, b, B: tl.constexpr):
    """Gives `root` a donor by the shortest path to a free one; returns prices and owners."""
    cols = tl.arange(0, B)
    is_open = (cols < b) & (owner != root)  # row b may have several donors: all are reached
    label = tl.where(owner == root, 0, tl.full([B], FAR, tl.int32))  # distance minus price
    before = tl.zeros([B], tl.int32)  # the row from which a donor is reached
    zero = tl.full((), 0, tl.int32)
    row, base, end, reached = root + zero, zero, zero, zero
    while row >= 0:
        offer = base - tl.load(cost_ptr + row * B + cols)
        better = is_open & (offer < label)
        label = tl.where(better, offer, label)
        before = tl.where(better, row, before)
        distance = tl.where(is_open, label + price, FAR)
        reached = tl.min(distance, 0)
        # among the nearest donors a free one, whose owner is -1, else that of the first owner
        key = tl.min(tl.where(distance == reached, (owner + 1) * B + cols, FAR), 0)
        end, row = key % B, key // B - 1
        is_end = cols == end
        base = reached - tl.sum(tl.where(is_end, price, 0), 0)
        base += tl.load(cost_ptr + tl.maximum(row, 0) * B + end)
        is_open = is_open & (is_end == 0)
    price = tl.where(is_open | (cols >= b), price, reached - label)
    row = zero - 1
    while row != root:  # back along the path, every donor to the row before it
        is_end = cols == end
        row = tl.sum(tl.where(is_end, before, 0), 0)
        end = tl.max(tl.where(owner == row, cols, 0), 0)
        owner = tl.where(is_end, row, owner)
    return price, owner


@triton.jit
def _assign(
    gain_ptr,
    easy_ptr,
    cost_ptr,
    kernel_ptr,
    donor_ptr,
    b,
    B: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    BIDS: tl.constexpr,
):
    cols = tl.arange(0, B)
    easy_rows, finite = _to_integers(gain_ptr, easy_ptr, cost_ptr, b, B, R)
    easy = tl.load(easy_ptr + cols, cols < b, 0) != 0
    own = tl.where(easy & (finite == 0), -1, cols)  # a hard sample's donor is itself
    tl.store(donor_ptr + cols, own.to(tl.int64), cols < b)
    if finite & (easy_rows > 0):
        price, owner = tl.zeros([B], tl.int32), tl.full([B], -1, tl.int32)
        if 8 * easy_rows > b:  # else few compete for a donor
            price = _prices(cost_ptr, kernel_ptr, b, easy_rows, B, R, N)
        moves, rounds = tl.full((), 1, tl.int32), tl.full((), 0, tl.int32)
        while (moves > 0) & (rounds < BIDS):
            price, owner, moves = _bid(cost_ptr, easy_ptr, price, owner, b, B, R)
            rounds += 1
        # `donor_ptr` tells which receivers have one: at the places of those it becomes -1
        tl.debug_barrier()
        tl.store(donor_ptr + owner, tl.full([B], -1, tl.int64), owner >= 0)
        tl.debug_barrier()
        waits = easy & (tl.load(donor_ptr + cols, cols < b, -1) >= 0)
        root = tl.min(tl.where(waits, cols, FAR), 0)
        while root < b:
            price, owner = _augment(cost_ptr, root, price, owner, b, B)
            waits = waits & (cols != root)
            root = tl.min(tl.where(waits, cols, FAR), 0)
        if easy_rows < b:
            cheapest = tl.min(tl.where(cols < b, price, FAR), 0)
            owner = tl.where((owner < 0) & (cols < b) & (price == cheapest), b, owner)
            while tl.max(((owner < 0) & (cols < b)).to(tl.int32), 0) > 0:
                price, owner = _augment(cost_ptr, b, price, owner, b, B)
        tl.debug_barrier()
        tl.store(donor_ptr + owner, cols.to(tl.int64), (owner >= 0) & (owner < b))


def device_donors(gain: Tensor, is_easy: Tensor) -> Tensor:
    """Returns the donor of every sample by optimal assignment (Eq. 7); a hard sample's is itself.

    `gain`: `b b`, receiver x donor, of which only the rows of easy samples count; `is_easy`: `b`
    bool. Returns `b` int64; -1 for all easy samples if the gain of one is not finite.
    """
    b = len(gain)
    size = max(triton.next_power_of_2(b), 16)
    rows = min(size, TILE // size)
    cost = gain.new_empty((b + rows) * size, dtype=torch.int32)
    kernel = torch.empty_like(cost, dtype=torch.float32)
    donor = gain.new_empty(b, dtype=torch.int64)
    tensors = (gain.contiguous(), is_easy.contiguous(), cost, kernel, donor)
    _assign[(1,)](*tensors, b, size, rows, ITERATIONS, BIDS, num_warps=WARPS)
    return donor


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
    """What keys receive, the mean over heads and queries: `b h n e`, `b h m e` -> `b m` float32.

    The products of float16 and bf16 are summed in float32, so no score overflows.
    """
    b, h, rows, width = q.shape
    keys = k.shape[2]
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    out = q.new_empty(b, h, keys, dtype=torch.float32)
    m, e = (max(16, triton.next_power_of_2(x)) for x in (keys, width))
    r = max(16, min(triton.next_power_of_2(rows), 64, SCORES // m))
    strides = (*q.stride()[:3], *k.stride()[:3])
    _received[b, h](q, k, out, h, rows, keys, width, scale, *strides, r, m, e, num_warps=WARPS)
    return out.sum(dim=1)
