"""Horizontal TokenMixup: easy samples take salient tokens from others (Section 3.3, Algorithm 1).

Letters: b batch, n tokens with prefix, t spatial tokens, d width, c classes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmixup.assignment import gain_matrix, optimal_assignment
from tokenmixup.speed import Exchange, copy_to_host, exchange_of


class HorizontalMix(NamedTuple):
    """What Algorithm 1 makes of a batch; `order=published` reorders tokens and targets alone."""

    tokens: Tensor  # b n d
    targets: Tensor  # b c
    donor: Tensor  # b int64, donor[i] == i for hard samples
    mask: Tensor  # b t bool, True = taken from the donor (the paper's 1 - M)
    gain: Tensor  # b t, saliency by which the donor's token exceeds the replaced one, else 0
    keep_ratio: Tensor  # b 1, weight of a sample's own label
    is_easy: Tensor  # b bool
    exchange: Exchange  # moves projections `b n k` as the tokens were moved


@torch.no_grad()
def optimal_donors(gain: Tensor, is_easy: Tensor) -> Tensor:
    """The donor of every sample by optimal assignment (Eq. 7), itself where it is hard.

    `gain`: `b b`, receiver x donor, `is_easy`: `b` bool. Returns `b` int64. Raises
    FloatingPointError if an easy sample's gain is not finite.
    """
    easy, offered = easy_rows(gain, is_easy)
    donor = torch.arange(len(gain))
    donor[easy] = optimal_assignment(offered)
    return donor.to(gain.device, non_blocking=True)


def easy_rows(gain: Tensor, is_easy: Tensor) -> tuple[Tensor, Tensor]:
    """Which samples are easy, `b`, and their rows of the gain matrix, on the host."""
    gain, is_easy = copy_to_host(gain, is_easy)
    return is_easy, gain[is_easy]


def gaining_tokens(own: Tensor, offered: Tensor, is_easy: Tensor, rho: float) -> Tensor:
    """Tokens whose donor is more salient by more than rho (Eq. 9, `eq:mask`): `b t` bool.

    `own`, `offered`: `b t`, saliency of the sample and of its donor.
    """
    return is_easy[:, None] & (offered - own > rho)


def saliency_ratio(saliency: Tensor, mask: Tensor) -> Tensor:
    """Kept saliency over kept plus taken saliency, 1 where both are 0 (Eq. 11): `b 1`.

    `saliency`, `mask`: `b t`, of the mixed tokens, and which of them are taken.
    """
    taken = (saliency * mask).sum(dim=1, keepdim=True)
    return (1 - taken / saliency.sum(dim=1, keepdim=True)).nan_to_num(1.0)


def in_place(is_easy: Tensor) -> None:
    """Every sample stays where it is in the batch (Algorithm 1, line 8)."""


class Rules(NamedTuple):
    """What Algorithm 1 leaves to be chosen, as the paper chooses; others are in `rules.py`."""

    match: Callable[[Tensor, Tensor], Tensor] = optimal_donors  # gain, is_easy -> donor
    choose: Callable[[Tensor, Tensor, Tensor, float], Tensor] = gaining_tokens  # -> mask
    weigh: Callable[[Tensor, Tensor], Tensor] = saliency_ratio  # mixed saliency, mask
    order: Callable[[Tensor], Tensor | None] = in_place  # is_easy -> b int64 where samples move
    skips_non_finite: bool = False  # then nothing is mixed, else the matching refuses such a gain


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

    `tokens`: `b n d`, of which the first `n - t`, the prefix, stay; `targets`: `b c`. `measure`
    tells the difficulty of each sample, `b`, and `detect` the saliency of each spatial token,
    `b t`. Raises ValueError if `t > n`, FloatingPointError if a gain is not finite.
    """
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
    gained = (mixed_saliency - saliency).nan_to_num(0)  # where it is not finite nothing is replaced
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
    """Mixes tokens and labels of the easy samples, where these are known: Algorithm 1 from line 4.

    `tokens`: `b n d`, `targets`: `b c`, `saliency`: `b t`, `is_easy`: `b` bool. Every easy sample
    is matched with a donor of its own; a spatial token is replaced when the donor's saliency
    exceeds its own by more than rho (Eq. 9, `eq:mask`, and 10, `eq:mix_x`); labels follow the
    saliency that was kept and taken (Eq. 11, `eq:mix_y`) and stay where both are 0. The first
    `n - t` tokens, the prefix, stay. Raises ValueError if `t > n`, FloatingPointError if a gain is
    not finite.
    """
    difficulty = 1 - is_easy.float()  # 0 or 1, and tau is 1
    return algorithm_1(tokens, targets, 1.0, rho, lambda *_: difficulty, lambda: saliency, rules)
