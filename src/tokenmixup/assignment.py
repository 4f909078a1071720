"""Matches receivers with donors: the gain of every pair and the best assignment (Section 3.2).

Letters: b batch, k receivers, t spatial tokens; rows are receivers, columns donors.
"""

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

REDUCED_FROM = 0.95  # share of receivers from which on reducing columns is always faster


@torch.no_grad()
def gain_matrix(saliency: Tensor, rho: float) -> Tensor:
    """Saliency that receiver i gains from donor j: C_ij = sum_t max(S_j - S_i - rho, 0).

    Eq. 6 (`eq:matchscore`). `saliency`: `b t`. Returns `b b` in float64 with a zero diagonal, zeros
    for `rho = inf`. Since max(x, 0) is the mean of |x| and x, the sum over tokens is the mean of an
    L1 distance and a difference of sums: no tensor of size `b b t` is needed.
    """
    saliency = saliency.double()  # the two halves nearly cancel
    if rho == float("inf"):
        return saliency.new_zeros(len(saliency), len(saliency))
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
    if receivers >= REDUCED_FROM * donors:
        values = _columns_reduced(values)
    return torch.from_numpy(linear_sum_assignment(values, maximize=True)[1][:receivers])


def check_finite(gain: Tensor) -> None:
    """Raises FloatingPointError if a gain is not finite."""
    if not gain.isfinite().all():
        raise FloatingPointError("the saliency gain is not finite: the model has diverged")


def _columns_reduced(gain: np.ndarray) -> np.ndarray:
    """Returns an equivalent assignment problem, `b b`, that the solver solves faster.

    Receivers without any gain pad it to a square, so every solution uses every donor; subtracting
    each donor's best gain then changes the total of every solution by the same amount.
    """
    square = np.zeros((gain.shape[1],) * 2)
    square[: len(gain)] = gain
    return square - square.max(axis=0)
