"""Matches receivers with donors: the gain of every pair and the best assignment (Section 3.2).

Letters: b batch, r receivers, t spatial tokens; rows are receivers, columns donors.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None  # comes with torch for CUDA on Linux
MOST_SAMPLES = 1024  # that the kernel matches; the host matches larger batches
HELD_GAINS = 2**25  # receivers x donors x tokens, which a GPU holds at once


class Diverged(FloatingPointError):
    """A gain in saliency is not finite."""


@torch.no_grad()
def gain_matrix(saliency: Tensor, rho: float) -> Tensor:
    """Saliency that receiver i gains from donor j: C_ij = sum_t max(S_j - S_i - rho, 0).

    Eq. 6 (`eq:matchscore`). `saliency`: `b t`. Returns `b b` in float64 with a zero diagonal, zeros
    for `rho = inf`.

    On a CPU no tensor of size `b b t` is formed: since max(x, 0) is the mean of |x| and x, the sum
    over tokens is the mean of an L1 distance and a difference of sums.
    """
    if rho == float("inf"):
        return saliency.new_zeros(len(saliency), len(saliency), dtype=torch.float64)
    saliency = saliency.double()  # below, distance and surplus nearly cancel
    less_rho = saliency - rho
    if saliency.is_cuda:  # Eq. 6 as printed, some receivers at a time: compiled, by one kernel
        at_once = max(1, HELD_GAINS // saliency.numel())
        parts = [
            (less_rho - own[:, None]).clamp(min=0).sum(dim=2) for own in saliency.split(at_once)
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts)
    distance = torch.cdist(saliency, less_rho, p=1)
    surplus = less_rho.sum(dim=1)[None, :] - saliency.sum(dim=1)[:, None]
    return distance.lerp_(surplus, 0.5).clamp_(min=0).fill_diagonal_(0)


def optimal_assignment(gain: Tensor) -> Tensor:
    """Returns different donors of maximal total gain (Eq. 7), by the Hungarian algorithm.

    `gain`: `r b` with r <= b; the solver runs on the host. Returns `r` int64 donor indices.
    Raises FloatingPointError if a gain is not finite.
    """
    from scipy.optimize import linear_sum_assignment  # takes a moment to import

    gain = gain.detach().double().cpu()
    check_finite(gain)
    return torch.from_numpy(linear_sum_assignment(gain.numpy(), maximize=True)[1])


def check_finite(gain: Tensor) -> None:
    """Raises Diverged if a gain is not finite; the sum of all shows it fastest."""
    if not gain.sum().isfinite():
        raise Diverged("the saliency gain is not finite: the model has diverged")


@torch.library.custom_op("tokenmixup::donors", mutates_args=())
def donors(gain: Tensor, is_easy: Tensor) -> Tensor:
    """`optimal_donors` as one operator of a compiled graph; by the kernel also of a CUDA graph."""
    if gain.is_cuda and HAS_TRITON and len(gain) <= MOST_SAMPLES:
        from tokenmixup.assignment_kernel import device_donors

        with torch.cuda.device(gain.device):  # Triton launches on the current one
            return device_donors(gain, is_easy)
    host_gain = gain.to("cpu", non_blocking=gain.is_cuda)
    host_easy = is_easy.to("cpu", non_blocking=gain.is_cuda)
    if gain.is_cuda:  # a single wait for both
        torch.cuda.current_stream(gain.device).synchronize()
    donor = torch.arange(len(gain), device="cpu")
    donor[host_easy] = optimal_assignment(host_gain[host_easy])
    return donor.to(gain.device, non_blocking=True)


@donors.register_fake
def _(gain: Tensor, is_easy: Tensor) -> Tensor:
    return torch.empty_like(is_easy, dtype=torch.int64)


@torch.no_grad()
def optimal_donors(gain: Tensor, is_easy: Tensor) -> Tensor:
    """Returns the donor of every sample by optimal assignment (Eq. 7); a hard sample's is itself.

    `gain`: `b b`, receiver x donor; `is_easy`: `b` bool. Returns `b` int64.

    On a GPU with Triton a kernel assigns up to 1,024 samples, else the host. Raises
    FloatingPointError if the gain of an easy sample is not finite; but the kernel, for which the
    host does not wait, then returns -1 for all easy samples, which indexes the last sample.
    """
    return donors(gain, is_easy)
