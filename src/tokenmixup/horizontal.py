"""Horizontal TokenMixup: easy samples take salient tokens from other samples (Algorithm 1).

Letters: b batch, n tokens with prefix, t spatial tokens, d width, c classes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokenmixup.assignment import gain_matrix, optimal_donors
from tokenmixup.device import has_kernels, operator


class HorizontalMix(NamedTuple):
    """A mixed batch, in the order of the samples."""

    tokens: Tensor  # b n d
    targets: Tensor  # b c
    donor: Tensor  # b int64, donor[i] == i for hard samples
    mask: Tensor  # b t bool, True = taken from the donor (the paper's 1 - M)
    gain: Tensor  # b t, saliency of the donor's token minus that of the replaced one, else 0
    keep_ratio: Tensor  # b 1, weight of a sample's own label
    is_easy: Tensor  # b bool
    rows: Tensor | None  # (b n) int64: the token that each is read from; None: by donor and mask

    def exchange(self, x: Tensor) -> Tensor:
        """Moves `b n k`, such as projections, as the tokens have been moved."""
        if self.rows is None:
            return cast(Tensor, Exchange.apply(x, self.donor, self.mask))
        return exchanged(x, self.rows)


def exchanged(x: Tensor, rows: Tensor) -> Tensor:
    """Reads the tokens of `b n d` from `rows`, `(b n)` int64."""
    return x.flatten(0, 1).index_select(0, rows).view_as(x)


class Exchange(torch.autograd.Function):
    """`exchanged` by `rows_of(donor, mask, n)` on a GPU, with a backward pass that gathers too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, donor: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(donor, mask)
        return exchange_on_device(x, donor, mask)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return exchange_backward_on_device(grad, *ctx.saved_tensors), None, None


def rows_of(donor: Tensor, mask: Tensor, n: int) -> Tensor:
    """Returns the rows that take the spatial tokens in `mask`, `b t`, from `donor`, `b`: `(b n)`.

    Every row is gathered, kept ones from themselves: gathering only replaced rows would make the
    host wait for their number.
    """
    rows = torch.arange(len(mask) * n, device=mask.device).view(-1, n)  # b n
    replace = F.pad(mask, (n - mask.shape[1], 0))  # b n
    return torch.where(replace, rows[donor], rows).flatten()


def exchange_by_rows(x: Tensor, donor: Tensor, mask: Tensor) -> Tensor:
    """What `Exchange` computes, `b n d`, by functions of torch."""
    return exchanged(x, rows_of(donor, mask, x.shape[1]))


def exchange_gradient_by_rows(grad: Tensor, donor: Tensor, mask: Tensor) -> Tensor:
    """The gradient of `exchange_by_rows` by the tokens, `b n d`, as torch's own."""
    out, rows = torch.zeros_like(grad), rows_of(donor, mask, grad.shape[1])
    out.flatten(0, 1).index_add_(0, rows, grad.flatten(0, 1))
    return out


exchange_on_device = operator(
    "exchange(Tensor x, Tensor donor, Tensor mask) -> Tensor",
    "kernels.exchange",
    exchange_by_rows,
    lambda x, donor, mask: torch.empty_like(x, memory_format=torch.contiguous_format),
)
exchange_backward_on_device = operator(
    "exchange_backward(Tensor grad, Tensor donor, Tensor mask) -> Tensor",
    "kernels.exchange_backward",
    exchange_gradient_by_rows,
    lambda grad, donor, mask: torch.empty_like(grad, memory_format=torch.contiguous_format),
)


def gaining_tokens(own: Tensor, offered: Tensor, is_easy: Tensor, rho: float) -> Tensor:
    """Marks tokens to replace: the donor's saliency is higher by more than rho (Eq. 9, `eq:mask`).

    `own`, `offered`: `b t`, saliency of the sample and of its donor; rho >= 0. Returns `b t` bool.
    Hard samples are their own donors, so nothing of them is replaced.
    """
    return offered - own > rho


def saliency_ratio(saliency: Tensor, mask: Tensor) -> Tensor:
    """Weight of a sample's own label: kept / (kept + taken) saliency, 1 for 0 / 0 (Eq. 11).

    `saliency`: `b t`, of the mixed tokens; `mask`: `b t`, the tokens taken. Returns `b 1`.
    """
    if has_kernels(saliency):
        return ratio_on_device(saliency, mask)
    return ratio_by_sums(saliency, mask)


def ratio_by_sums(saliency: Tensor, mask: Tensor) -> Tensor:
    """`saliency_ratio` by functions of torch."""
    kept = saliency.masked_fill(mask, 0).sum(dim=1, keepdim=True)
    return (kept / saliency.sum(dim=1, keepdim=True)).nan_to_num(1.0)


ratio_on_device = operator(
    "ratio(Tensor saliency, Tensor mask) -> Tensor",
    "kernels.ratio",
    ratio_by_sums,
    lambda saliency, mask: saliency.new_empty(len(saliency), 1),
)


class Rules(NamedTuple):
    """The exchangeable parts of Algorithm 1, by default the paper's; `rules.py` has others."""

    # saliency b t, rho -> gain b b of every pair, receiver x donor
    score: Callable[[Tensor, float], Tensor] = gain_matrix
    # gain b b, is_easy b -> donor b, a hard sample's is itself
    match: Callable[[Tensor, Tensor], Tensor] = optimal_donors
    # own saliency b t, the donor's b t, is_easy b, rho -> mask b t, True: take the donor's token
    choose: Callable[[Tensor, Tensor, Tensor, float], Tensor] = gaining_tokens
    # saliency of the mixed tokens b t, mask b t -> keep_ratio b 1
    weigh: Callable[[Tensor, Tensor], Tensor] = saliency_ratio


PAPER = Rules()


def mix_horizontal(
    tokens: Tensor,
    targets: Tensor,
    saliency: Tensor,
    difficulty: Tensor,
    tau: float,
    rho: float,
    rules: Rules = PAPER,
) -> HorizontalMix:
    """Mixes tokens and labels of the easy samples of a batch: Algorithm 1, line by line.

    `tokens`: `b n d`; the first `n - t`, the prefix, are never replaced. `targets`: `b c`.
    `saliency`: `b t`, of the spatial tokens (line 2, Eq. 3). `difficulty`: `b`, in nats (line 1,
    Eq. 1); samples below `tau` are easy. `rho` >= 0: the gain in saliency above which a token is
    replaced. Samples stay at their places (line 8). Raises ValueError if `t > n` or the targets are
    not `b c`, FloatingPointError if a gain is not finite; but on a GPU, which would have to be
    waited for, the targets and `gain` then are nan, and so is the loss.
    """
    if targets.ndim != 2 or len(targets) != len(tokens):
        raise ValueError(f"targets {[*targets.shape]}: must be probabilities b c")
    saliency = saliency.detach().float()
    if saliency.shape[1] > tokens.shape[1]:
        raise ValueError(f"saliency of {saliency.shape[1]} tokens, but {tokens.shape[1]} to mix")
    is_easy = difficulty < tau  # 3: Eq. 8
    gain = rules.score(saliency, rho)  # 4: Eq. 6, b b
    donor = rules.match(gain, is_easy)  # 5: Eq. 7, sigma of every sample
    offered = saliency[donor]
    mask = rules.choose(saliency, offered, is_easy, rho)  # Eq. 9
    targets = targets if targets.is_floating_point() else targets.float()
    mixed_saliency = torch.where(mask, offered, saliency)
    keep_ratio = rules.weigh(mixed_saliency, mask).to(targets.dtype)
    gained = (mixed_saliency - saliency).nan_to_num(0)  # saliency may be nan where rho is inf
    if donor.is_cuda:  # where a gain that is not finite gives no donor, instead of an exception
        failed = donor[:, None] < 0
        keep_ratio, gained = (x.masked_fill(failed, torch.nan) for x in (keep_ratio, gained))
    rows = None if has_kernels(tokens) else rows_of(donor, mask, tokens.shape[1])
    mix = HorizontalMix(tokens, targets, donor, mask, gained, keep_ratio, is_easy, rows)
    return mix._replace(
        tokens=mix.exchange(tokens),  # 6: Eq. 10, where(mask, tokens[donor], tokens)
        targets=targets[donor].lerp(targets, keep_ratio),  # 7: Eq. 11
    )
