"""Horizontal TokenMixup: easy samples take salient tokens from other samples (Algorithm 1).

Letters: b batch, n tokens with prefix, t spatial tokens, d width, c classes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmixup.assignment import gain_matrix, optimal_assignment
from tokenmixup.speed import Exchange, copy_to_host, exchange_of


class HorizontalMix(NamedTuple):
    """A mixed batch. `order=published` reorders `tokens` and `targets`, and no other field."""

    tokens: Tensor  # b n d
    targets: Tensor  # b c
    donor: Tensor  # b int64, donor[i] == i for hard samples
    mask: Tensor  # b t bool, True = taken from the donor (the paper's 1 - M)
    gain: Tensor  # b t, saliency of the donor's token minus that of the replaced one, else 0
    keep_ratio: Tensor  # b 1, weight of a sample's own label
    is_easy: Tensor  # b bool
    exchange: Exchange  # moves projections `b n k` as it has moved the tokens


@torch.no_grad()
def optimal_donors(gain: Tensor, is_easy: Tensor) -> Tensor:
    """Returns the donor of every sample by optimal assignment (Eq. 7); a hard sample's is itself.

    `gain`: `b b`, receiver x donor; `is_easy`: `b` bool. Returns `b` int64. Raises
    FloatingPointError if the gain of an easy sample is not finite.
    """
    is_easy, gain_of_easy = easy_rows(gain, is_easy)
    donor = torch.arange(len(gain))
    donor[is_easy] = optimal_assignment(gain_of_easy)
    return donor.to(gain.device, non_blocking=True)


def easy_rows(gain: Tensor, is_easy: Tensor) -> tuple[Tensor, Tensor]:
    """Returns, on the host, the easy flags, `b`, and the easy samples' rows of the gain matrix."""
    gain, is_easy = copy_to_host(gain, is_easy)
    return is_easy, gain[is_easy]


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
    kept = saliency.masked_fill(mask, 0).sum(dim=1, keepdim=True)
    return (kept / saliency.sum(dim=1, keepdim=True)).nan_to_num(1.0)


def in_place(is_easy: Tensor) -> None:
    """Keeps every sample at its place in the batch (Algorithm 1, line 8)."""


class Rules(NamedTuple):
    """The exchangeable parts of Algorithm 1, by default the paper's; `rules.py` has others."""

    # gain b b, is_easy b -> donor b, a hard sample's is itself
    match: Callable[[Tensor, Tensor], Tensor] = optimal_donors
    # own saliency b t, the donor's b t, is_easy b, rho -> mask b t, True: take the donor's token
    choose: Callable[[Tensor, Tensor, Tensor, float], Tensor] = gaining_tokens
    # saliency of the mixed tokens b t, mask b t -> keep_ratio b 1
    weigh: Callable[[Tensor, Tensor], Tensor] = saliency_ratio
    # is_easy b -> new order b, None: unchanged
    order: Callable[[Tensor], Tensor | None] = in_place
    skips_non_finite: bool = False  # a gain that is not finite: mix nothing, instead of raising


PAPER = Rules()


def algorithm_1(
    tokens: Tensor,
    targets: Tensor,
    tau: float,
    rho: float,
    measure: Callable[[Tensor, Tensor], Tensor],
    detect: Callable[[], Tensor],
    rules: Rules = PAPER,
) -> HorizontalMix:
    """Mixes tokens and labels of the easy samples of a batch: Algorithm 1, line by line.

    `tokens`: `b n d`; the first `n - t`, the prefix, are never replaced. `targets`: `b c`.
    `measure` returns the difficulty of each sample, `b`; `detect` the saliency of each spatial
    token, `b t`. Raises ValueError if `t > n` or the targets are not `b c`, FloatingPointError if a
    gain is not finite.
    """
    if targets.ndim != 2 or len(targets) != len(tokens):
        raise ValueError(f"targets {[*targets.shape]}: must be probabilities b c")
    difficulty = measure(tokens, targets)  # 1: Eq. 1
    saliency = detect().detach().float()  # 2: Eq. 3
    if saliency.shape[1] > tokens.shape[1]:
        raise ValueError(f"saliency of {saliency.shape[1]} tokens, but {tokens.shape[1]} to mix")
    is_easy = difficulty < tau  # 3: Eq. 8
    gain = gain_matrix(saliency, rho)  # 4: Eq. 6, b b
    if rules.skips_non_finite:
        finite = gain.isfinite().all()
        is_easy, saliency = is_easy & finite, saliency.where(finite, 0)
    donor = rules.match(gain, is_easy)  # 5: Eq. 7, sigma of every sample
    offered = saliency[donor]
    mask = rules.choose(saliency, offered, is_easy, rho)  # Eq. 9
    exchange = exchange_of(donor, mask, tokens.shape[1], rules.order(is_easy))
    mixed_tokens = exchange(tokens)  # 6 and 8: Eq. 10, where(mask, tokens[donor], tokens)
    targets = targets if targets.is_floating_point() else targets.float()
    mixed_saliency = torch.where(mask, offered, saliency)
    keep_ratio = rules.weigh(mixed_saliency, mask).to(targets.dtype)
    mixed_targets = targets[donor].lerp(targets, keep_ratio)  # 7: Eq. 11
    mixed_targets = exchange.reorder(mixed_targets)  # 8
    gained = (mixed_saliency - saliency).nan_to_num(0)  # saliency may be nan where rho is inf
    return HorizontalMix(
        mixed_tokens, mixed_targets, donor, mask, gained, keep_ratio, is_easy, exchange
    )


def mix_horizontal(
    tokens: Tensor,
    targets: Tensor,
    saliency: Tensor,
    is_easy: Tensor,
    rho: float,
    *,
    rules: Rules = PAPER,
) -> HorizontalMix:
    """Mixes tokens and labels, given saliency and easy samples: Algorithm 1 from line 4 on.

    `tokens`: `b n d`; `targets`: `b c`; `saliency`: `b t`; `is_easy`: `b` bool; `rho` >= 0. Every
    easy sample gets a donor of its own. A spatial token is replaced by the donor's if that is more
    salient by more than rho (Eq. 9, `eq:mask`, and 10, `eq:mix_x`). Labels are weighted by the
    saliency kept and taken (Eq. 11, `eq:mix_y`), and unchanged if both are 0. The first `n - t`
    tokens, the prefix, are never replaced. Raises the errors of `algorithm_1`.
    """
    difficulty = 1 - is_easy.float()  # 0 or 1, and tau is 1
    return algorithm_1(tokens, targets, 1.0, rho, lambda *_: difficulty, lambda: saliency, rules)
