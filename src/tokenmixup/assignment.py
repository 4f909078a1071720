"""Matches receivers with donors: the gain of every pair and the best assignment (Section 3.2).

Letters: b batch, k receivers, t spatial tokens; rows are receivers, columns donors.
"""

from collections.abc import Callable
from functools import wraps

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from tokenmixup.device import has_kernels, operator

Match = Callable[[Tensor, Tensor], Tensor]  # gain b b, is_easy b -> donor b

# From these numbers on, reducing saves time on saliency of trained models.
REDUCED_SIZE = 96  # donors
REDUCED_SHARE = 0.7  # receivers / donors
REDUCED_MEAN = 0.04  # mean gain / largest gain; the solver is fast where most pairs gain nothing
ROUNDING = 1e-12  # of gains: all of them are rounding errors if their mean is below
MOST_ON_DEVICE = 1024  # samples; the host matches larger batches


def on_host(match: Match) -> Match:
    """Makes a matching on the host one operator for a compiler, `tokenmixup::<its name>`.

    The compiler does not trace into it, and a CUDA graph does not capture it.
    """
    name, tags = f"tokenmixup::{match.__name__}", (torch.Tag.cudagraph_unsafe,)
    schema = "(Tensor gain, Tensor is_easy) -> Tensor"
    operator = torch.library.custom_op(name, match, mutates_args=(), schema=schema, tags=tags)
    operator.register_fake(lambda gain, is_easy: torch.empty_like(is_easy, dtype=torch.int64))

    @wraps(match)
    @torch.no_grad()
    def run(gain: Tensor, is_easy: Tensor) -> Tensor:
        return (operator if torch.compiler.is_compiling() else match)(gain, is_easy)

    return run


@torch.no_grad()
def gain_matrix(saliency: Tensor, rho: float) -> Tensor:
    """Saliency that receiver i gains from donor j: C_ij = sum_t max(S_j - S_i - rho, 0).

    Eq. 6 (`eq:matchscore`). `saliency`: `b t`. Returns `b b` in float64 with a zero diagonal, zeros
    for `rho = inf`.
    """
    if rho == float("inf"):
        return saliency.new_zeros(len(saliency), len(saliency), dtype=torch.float64)
    if has_kernels(saliency):
        return gain_on_device(saliency.float(), rho)
    return gain_by_distance(saliency, rho)


def gain_by_distance(saliency: Tensor, rho: float) -> Tensor:
    """`gain_matrix` by functions of torch, for finite rho.

    Since max(x, 0) is the mean of |x| and x, the sum over tokens is the mean of an L1 distance and
    a difference of sums: no tensor of size `b b t` is needed.
    """
    saliency = saliency.double()  # the two halves nearly cancel
    offered = saliency - rho
    distance = torch.cdist(saliency, offered, p=1)
    surplus = offered.sum(dim=1)[None, :] - saliency.sum(dim=1)[:, None]
    return distance.lerp_(surplus, 0.5).clamp_(min=0).fill_diagonal_(0)


def optimal_assignment(gain: Tensor) -> Tensor:
    """Returns different donors of maximal total gain (Eq. 7), by the Hungarian algorithm.

    `gain`: `k b` with k <= b; the solver runs on the host. Returns `k` int64 donor indices.
    Raises ValueError if k > b, FloatingPointError if a gain is not finite.
    """
    gain = gain.detach().double().cpu()
    receivers, donors = gain.shape
    if receivers > donors:
        raise ValueError(f"{receivers} receivers cannot have different donors out of {donors}")
    check_finite(gain)
    values = gain.numpy()
    if _is_reducible(values):
        values = _reduced(values)
    return torch.from_numpy(linear_sum_assignment(values, maximize=True)[1][:receivers])


@torch.no_grad()
def optimal_donors(gain: Tensor, is_easy: Tensor) -> Tensor:
    """Returns the donor of every sample by optimal assignment (Eq. 7); a hard sample's is itself.

    `gain`: `b b`, receiver x donor; `is_easy`: `b` bool. Returns `b` int64. If the gain of an easy
    sample is not finite, raises FloatingPointError on the host; a GPU, which nobody waits for,
    gives all easy samples the donor -1.
    """
    if has_kernels(gain) and len(gain) <= MOST_ON_DEVICE:
        return donors_on_device(gain, is_easy)
    return donors_on_host(gain, is_easy)


@on_host
def donors_on_host(gain: Tensor, is_easy: Tensor) -> Tensor:
    """`optimal_donors` by scipy's solver."""
    is_easy, gain_of_easy = easy_rows(gain, is_easy)
    donor = torch.arange(len(gain), device="cpu")
    donor[is_easy] = optimal_assignment(gain_of_easy)
    return donor.to(gain.device, non_blocking=True)


gain_on_device = operator(
    "gain(Tensor saliency, float rho) -> Tensor",
    "kernels.gain",
    gain_by_distance,
    lambda saliency, rho: saliency.new_empty(len(saliency), len(saliency), dtype=torch.float64),
)
donors_on_device = operator(
    "donors(Tensor gain, Tensor is_easy) -> Tensor",
    "device_assignment.device_donors",
    donors_on_host,
    lambda gain, is_easy: torch.empty_like(is_easy, dtype=torch.int64),
)


def easy_rows(gain: Tensor, is_easy: Tensor) -> tuple[Tensor, Tensor]:
    """Returns, on the host, the easy flags, `b`, and the easy samples' rows of the gain matrix.

    From a GPU they are copied asynchronously, with a single wait for both.
    """
    host_gain, host_easy = (x.to("cpu", non_blocking=x.is_cuda) for x in (gain, is_easy))
    if gain.is_cuda:
        torch.cuda.current_stream(gain.device).synchronize()
    return host_easy, host_gain[host_easy]


def check_finite(gain: Tensor) -> None:
    """Raises FloatingPointError if a gain is not finite; their sum shows it fastest."""
    if not gain.sum().isfinite():
        raise FloatingPointError("the saliency gain is not finite: the model has diverged")


def _is_reducible(gain: np.ndarray) -> bool:
    """Whether reducing the problem, `k b`, saves more time than it takes."""
    receivers, donors = gain.shape
    if donors < REDUCED_SIZE or receivers < REDUCED_SHARE * donors:
        return False
    return bool(gain.mean() > max(REDUCED_MEAN * gain.max(), ROUNDING))


def _reduced(gain: np.ndarray) -> np.ndarray:
    """Returns an equivalent assignment problem, `b b`, that the solver solves faster.

    Receivers without any gain pad it to a square, so every solution uses every donor. Subtracting
    numbers from rows and columns then changes the total of every solution by the same amount. The
    closer they are to the problem's dual values, the shorter the solver's searches.
    """
    square = np.zeros((gain.shape[1],) * 2)
    square[: len(gain)] = gain
    square -= _dual_rows(square)
    return square - square.max(axis=0)


def _dual_rows(gain: np.ndarray) -> np.ndarray:
    """Returns the approximate dual value of each row of `b b`, as `b 1`.

    Sinkhorn's iterations in float32 maximise gain and entropy (Cuturi, 2013); the temperature is
    a share of the mean regret, first a large and then a small one.
    """
    scale = gain.max() or 1.0
    surplus = (gain / scale).astype(np.float32)
    surplus -= surplus.max(axis=0)
    duals = np.zeros((len(gain), 1))
    for share in (0.05, 0.01):
        best = surplus.max(axis=1, keepdims=True)
        surplus -= best
        temperature = max(-share * surplus.mean(), np.finfo(np.float32).tiny)
        kernel = np.exp(np.maximum(surplus / temperature, -40))  # bounded for float32's range
        rows = np.ones(len(gain), np.float32)
        for _ in range(15):
            columns = 1 / (rows @ kernel)
            rows = 1 / (kernel @ columns)
        shift = temperature * np.log(rows)[:, None]
        surplus += shift + temperature * np.log(columns)
        duals += best - shift
    return duals * scale
