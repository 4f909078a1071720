"""The optimal assignment on a GPU, which the host does not wait for.

Gains become integers of at most 28 bits. Whatever follows is exact and independent of the order of
threads, so every run gives the same donors, whose total gain is below the optimum by at most
`easy samples x 2^-28` of the largest gain.

1. `_prices`: Sinkhorn's iterations in float32 guess what each donor is worth. Any start is right;
   a good one leaves little to the searches. Skipped if few samples are easy.
2. `_bid`: receivers without a donor bid for their best one and raise its price by what it is worth
   more than their second best. So a receiver's donor always is one of its best at these prices.
3. `_augment`: shortest augmenting paths for the remaining receivers (Jonker and Volgenant, 1987).
4. The total gain is the largest if every receiver has one of its best donors at the prices, and
   every donor that is left over has the lowest price of all. Hard samples leave some over: those of
   that price are given to a dummy receiver, row `b`, whose gains are 0, and a search from it ends
   at each of the others. What row `b` has in the end is left over.

The first two are one kernel, of many threads, since they go through all gains; the others are a
second one, of few, since a search goes through one row after another.

Letters: b batch, B the power of two from it on, R rows of a tile; rows receive, columns give.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ONE = tl.constexpr(2**28)  # the largest gain; sums of four such numbers fit into 31 bits
FAR = tl.constexpr(2**31 - 1)
NEVER = tl.constexpr(-(2**30))  # worth of a column that is none
NO_SEARCH = tl.constexpr(-1)  # donor of a sample that has one already, or never gets one
SMALLEST = tl.constexpr(1e-290)  # gains whose range is below are taken as equal
COOLING = tl.constexpr(0.3)
OVERRELAXED = tl.constexpr(1.4)  # steps of Sinkhorn's iterations (Thibault et al., 2017)
LARGEST_EXPONENT = tl.constexpr(100.0)  # of a donor's factor, a power of two
LN_2 = tl.constexpr(0.6931471805599453)
TILE = 2**12  # gains that are processed together; more need registers that spill
# Chosen by counted steps and instructions, not yet by times on a GPU
ITERATIONS = 4  # of Sinkhorn's, in each phase
BIDS = 4  # rounds of them
WARPS = 16  # of the first kernel
SEARCHED = 256  # columns for each warp of the second, which waits for all of them at each step


@triton.jit
def _load(int_gain_ptr, first, b, B: tl.constexpr, R: tl.constexpr):
    """Integer gains of the rows from `first` on, `R B`, and the row numbers; 0 outside."""
    cols, row = tl.arange(0, B), first + tl.arange(0, R)
    return tl.load(int_gain_ptr + row[:, None] * B + cols[None, :], (row < b)[:, None], 0), row


@triton.jit
def _easy_gains(gain_ptr, easy_ptr, first, b, B: tl.constexpr, R: tl.constexpr):
    """Gains of the rows from `first` on, `R B` float64, where the row is of an easy sample."""
    cols, row = tl.arange(0, B), first + tl.arange(0, R)
    easy = tl.load(easy_ptr + row, row < b, 0) != 0
    used = easy[:, None] & (cols < b)[None, :]
    gain = tl.load(gain_ptr + row[:, None] * b + cols[None, :], used, 0.0)
    return gain.to(tl.float64), used, tl.sum(easy.to(tl.int32), 0)


@triton.jit
def _to_integers(gain_ptr, easy_ptr, int_gain_ptr, b, B: tl.constexpr, R: tl.constexpr):
    """Writes the gains as integers, `b+1 B`, zeros for hard samples and for row b.

    The smallest gain becomes 0, since every easy sample takes exactly one donor. Returns the number
    of easy samples, and whether their gains are finite.
    """
    cols = tl.arange(0, B)
    top = tl.full([R, B], -float("inf"), tl.float64)
    low = tl.full([R, B], float("inf"), tl.float64)
    wrong, easy_rows = tl.zeros([R, B], tl.int32), tl.full((), 0, tl.int32)
    for first in range(0, b, R):
        gain, used, easy = _easy_gains(gain_ptr, easy_ptr, first, b, B, R)
        wrong += ((tl.abs(gain) < float("inf")) == 0).to(tl.int32)  # nan too
        top = tl.maximum(top, tl.where(used, gain, -float("inf")))
        low = tl.minimum(low, tl.where(used, gain, float("inf")))
        easy_rows += easy
    least = tl.min(low)
    span = tl.max(top) - least
    finite = tl.sum(wrong) == 0
    has_span = finite & (span > SMALLEST) & (span < float("inf"))
    scale = tl.where(has_span, 1.0 / tl.where(has_span, span, 1.0) * ONE, 0.0)
    least = tl.where(has_span, least, 0.0)
    for first in range(0, b + 1, R):
        gain, used, _ = _easy_gains(gain_ptr, easy_ptr, first, b, B, R)
        int_gain = tl.where(used & has_span, (gain - least) * scale + 0.5, 0.0).to(tl.int32)
        row = first + tl.arange(0, R)
        tl.store(int_gain_ptr + row[:, None] * B + cols[None, :], int_gain, (row <= b)[:, None])
    tl.debug_barrier()
    return easy_rows, finite


@triton.jit
def _regrets(int_gain_ptr, price, first, b, B: tl.constexpr, R: tl.constexpr):
    """What each donor is worth less than the row's best one at these prices, `R B` float32 >= 0."""
    cols = tl.arange(0, B)
    int_gain, row = _load(int_gain_ptr, first, b, B, R)
    inside = (row < b)[:, None] & (cols < b)[None, :]
    worth = tl.where(inside, int_gain.to(tl.float32) / ONE - price[None, :], -4.0)
    return tl.where(inside, tl.max(worth, 1)[:, None] - worth, 0.0), inside, row


@triton.jit
def _write_gibbs(int_gain_ptr, gibbs_ptr, price, share, b, B: tl.constexpr, R: tl.constexpr):
    """Writes the Gibbs kernel at these prices, `b B`; returns its temperature.

    That is `share` of the mean regret.
    """
    cols = tl.arange(0, B)
    sums = tl.zeros([R, B], tl.float32)
    for first in range(0, b, R):
        regret, _, _ = _regrets(int_gain_ptr, price, first, b, B, R)
        sums += regret
    heat = tl.maximum(share * tl.sum(sums) / b / b, 1e-30)
    for first in range(0, b, R):
        regret, inside, row = _regrets(int_gain_ptr, price, first, b, B, R)
        # bounded to the range of float32
        gibbs = tl.where(inside, tl.exp(tl.maximum(-regret / heat, -40.0)), 0.0)
        tl.store(gibbs_ptr + row[:, None] * B + cols[None, :], gibbs)
    tl.debug_barrier()
    return heat


@triton.jit
def _donor_factors(gibbs_ptr, b, B: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """N of Sinkhorn's iterations; returns the factors of the donors as exponents of 2, `B`."""
    cols = tl.arange(0, B)
    exponent = tl.zeros([B], tl.float32)
    for _ in range(N):
        factor = tl.exp2(exponent)
        wanted = tl.zeros([R, B], tl.float32)
        for first in range(0, b, R):
            row = first + tl.arange(0, R)
            gibbs = tl.load(gibbs_ptr + row[:, None] * B + cols[None, :])
            total = tl.sum(gibbs * factor[None, :], 1)
            weight = tl.where(row < b, 1.0 / tl.where(row < b, total, 1.0), 0.0)
            wanted += gibbs * weight[:, None]
        step = -tl.log2(tl.sum(wanted, 0)) - exponent
        exponent += OVERRELAXED * step
        exponent = tl.minimum(tl.maximum(exponent, -LARGEST_EXPONENT), LARGEST_EXPONENT)
    tl.debug_barrier()
    return exponent


@triton.jit
def _above_the_free(price, b, easy_rows, B: tl.constexpr):
    """Returns prices as integers in 0..ONE, above that of the donors that stay free.

    Bisects for the price that as many donors do not exceed as stay without a receiver.
    """
    cols = tl.arange(0, B)
    int_price = (tl.minimum(tl.maximum(price, -3.5), 3.5) * ONE).to(tl.int32)
    low = tl.min(tl.where(cols < b, int_price, FAR), 0)
    high = tl.max(tl.where(cols < b, int_price, -FAR), 0)
    free = tl.maximum(b - easy_rows, 1)
    while low < high:
        middle = low + (high - low) // 2
        enough = tl.sum(((int_price <= middle) & (cols < b)).to(tl.int32), 0) >= free
        low = tl.where(enough, low, middle + 1)
        high = tl.where(enough, middle, high)
    return tl.minimum(tl.maximum(int_price - low, 0), ONE)


@triton.jit
def _prices(
    int_gain_ptr, gibbs_ptr, b, easy_rows, B: tl.constexpr, R: tl.constexpr, N: tl.constexpr
):
    """Guesses the dual values of the donors, `B` integers in 0..ONE.

    Maximises gain and entropy (Cuturi, 2013) at falling temperatures: 20, 6, 1.8 and 0.5 % of the
    mean regret.
    """
    largest = tl.zeros([R, B], tl.int32)
    for first in range(0, b, R):
        int_gain, _ = _load(int_gain_ptr, first, b, B, R)
        largest = tl.maximum(largest, int_gain)
    price = tl.max(largest, 0).to(tl.float32) / ONE
    share = tl.full((), 0.2, tl.float32)
    for _phase in range(4):
        heat = _write_gibbs(int_gain_ptr, gibbs_ptr, price, share, b, B, R)
        price -= heat * LN_2 * _donor_factors(gibbs_ptr, b, B, R, N)
        share *= COOLING
    return _above_the_free(price, b, easy_rows, B)


@triton.jit
def _bid(int_gain_ptr, easy_ptr, price, owner, b, B: tl.constexpr, R: tl.constexpr):
    """Lets every waiting receiver bid once; returns prices, owners and the number of moves."""
    cols = tl.arange(0, B)
    raised, winner = tl.full([B], -1, tl.int32), tl.full([B], -1, tl.int32)
    for first in range(0, b, R):
        int_gain, row = _load(int_gain_ptr, first, b, B, R)
        has = tl.max((owner[None, :] == row[:, None]).to(tl.int32), 1) > 0
        waits = (tl.load(easy_ptr + row, row < b, 0) != 0) & (has == 0)
        worth = tl.where((cols < b)[None, :], int_gain - price[None, :], NEVER)
        best = tl.max(worth, 1)
        place = tl.min(tl.where(worth == best[:, None], cols[None, :], B), 1)
        here = cols[None, :] == place[:, None]
        lead = best - tl.max(tl.where(here, NEVER, worth), 1)
        bid = tl.where(here & waits[:, None], tl.minimum(lead, ONE)[:, None], -1)
        highest = tl.max(bid, 0)
        who = tl.min(tl.where((bid == highest[None, :]) & (bid >= 0), row[:, None], FAR), 0)
        winner = tl.where(highest > raised, who, winner)
        raised = tl.maximum(raised, highest)
    # a bid of 0 wins only a donor that nobody has: receivers would take it from each other by turns
    moves = (raised > 0) | ((raised == 0) & (owner < 0))
    owner = tl.where(moves, winner, owner)
    return price + tl.where(moves, raised, 0), owner, tl.sum(moves.to(tl.int32), 0)


@triton.jit
def _augment(int_gain_ptr, root, price, owner, b, B: tl.constexpr):
    """Gives `root` a donor by the shortest path to a free one; returns prices and owners."""
    cols = tl.arange(0, B)
    is_open = (cols < b) & (owner != root)  # row b may have several donors: all are reached
    label = tl.where(owner == root, 0, tl.full([B], FAR, tl.int32))  # distance minus price
    before = tl.zeros([B], tl.int32)  # the row from which a donor is reached
    zero = tl.full((), 0, tl.int32)  # a tensor, as a loop must not change the type of a variable
    row = root + zero  # from which the paths go on; -1 once a free donor is reached
    base = zero  # the distance of the donor that `row` has, plus what it is worth to `row`
    end = zero  # the nearest of the open donors
    reached = zero  # its distance
    while row >= 0:
        offer = base - tl.load(int_gain_ptr + row * B + cols)
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
        base += tl.load(int_gain_ptr + tl.maximum(row, 0) * B + end)
        is_open = is_open & (is_end == 0)
    # a donor at a smaller distance than `reached` gets dearer by the difference
    price = tl.where(is_open | (cols >= b), price, reached - label)
    row = zero - 1
    while row != root:  # back along the path, every donor to the row before it
        is_end = cols == end
        row = tl.sum(tl.where(is_end, before, 0), 0)
        end = tl.max(tl.where(owner == row, cols, 0), 0)
        owner = tl.where(is_end, row, owner)
    return price, owner


@triton.jit
def _start(
    gain_ptr,
    easy_ptr,
    int_gain_ptr,
    gibbs_ptr,
    price_ptr,
    owner_ptr,
    donor_ptr,
    b,
    B: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    BIDS: tl.constexpr,
):
    """Steps 1 and 2: writes prices, owners, and as donors what is left to `_search`.

    A hard sample's is its own index, which stays. An easy one's is NO_SEARCH if it has a donor or a
    gain is not finite; else its own index: it waits.
    """
    cols = tl.arange(0, B)
    easy_rows, finite = _to_integers(gain_ptr, easy_ptr, int_gain_ptr, b, B, R)
    easy = tl.load(easy_ptr + cols, cols < b, 0) != 0
    own = tl.where(easy & (finite == 0), NO_SEARCH, cols)  # a hard sample's donor is itself
    tl.store(donor_ptr + cols, own.to(tl.int64), cols < b)
    price, owner = tl.zeros([B], tl.int32), tl.full([B], -1, tl.int32)
    if finite & (easy_rows > 0):
        if 8 * easy_rows > b:  # else few compete for a donor
            price = _prices(int_gain_ptr, gibbs_ptr, b, easy_rows, B, R, N)
        moves, rounds = tl.full((), 1, tl.int32), tl.full((), 0, tl.int32)
        while (moves > 0) & (rounds < BIDS):
            price, owner, moves = _bid(int_gain_ptr, easy_ptr, price, owner, b, B, R)
            rounds += 1
    tl.debug_barrier()
    tl.store(donor_ptr + owner, tl.full([B], NO_SEARCH, tl.int64), owner >= 0)
    tl.store(price_ptr + cols, price)
    tl.store(owner_ptr + cols, owner)


@triton.jit
def _search(int_gain_ptr, easy_ptr, price_ptr, owner_ptr, donor_ptr, b, B: tl.constexpr):
    """Steps 3 and 4: writes the donors."""
    cols = tl.arange(0, B)
    price, owner = tl.load(price_ptr + cols), tl.load(owner_ptr + cols)
    easy = tl.load(easy_ptr + cols, cols < b, 0) != 0
    waits = easy & (tl.load(donor_ptr + cols, cols < b, NO_SEARCH) != NO_SEARCH)
    root = tl.min(tl.where(waits, cols, FAR), 0)
    while root < b:
        price, owner = _augment(int_gain_ptr, root, price, owner, b, B)
        waits = waits & (cols != root)
        root = tl.min(tl.where(waits, cols, FAR), 0)
    easy_rows = tl.sum(easy.to(tl.int32), 0)
    if easy_rows < b:
        cheapest = tl.min(tl.where(cols < b, price, FAR), 0)
        owner = tl.where((owner < 0) & (cols < b) & (price == cheapest), b, owner)
        while tl.max(((owner < 0) & (cols < b)).to(tl.int32), 0) > 0:
            price, owner = _augment(int_gain_ptr, b, price, owner, b, B)
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
    gain, is_easy = gain.contiguous(), is_easy.contiguous()
    int_gain = gain.new_empty((b + rows) * size, dtype=torch.int32)
    gibbs = torch.empty_like(int_gain, dtype=torch.float32)
    price, owner = int_gain.new_empty(2, size)
    donor = gain.new_empty(b, dtype=torch.int64)
    state = (price, owner, donor)
    _start[(1,)](
        gain, is_easy, int_gain, gibbs, *state, b, size, rows, ITERATIONS, BIDS, num_warps=WARPS
    )
    _search[(1,)](int_gain, is_easy, *state, b, size, num_warps=max(1, size // SEARCHED))
    return donor
