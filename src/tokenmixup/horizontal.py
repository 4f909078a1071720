"""Horizontal TokenMixup: easy samples take salient tokens from other samples (Algorithm 1).

Letters: b batch, n tokens with prefix, t spatial tokens, d width, c classes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmixup.assignment import gain_matrix, optimal_donors


class HorizontalMix(NamedTuple):
    """A mixed batch, in the order of the samples."""

    tokens: Tensor  # b n d
    targets: Tensor  # b c
    donor: Tensor  # b int64, donor[i] == i for hard samples
    mask: Tensor  # b t bool, True = taken from the donor (the paper's 1 - M)
    gain: Tensor  # b t, saliency of the donor's token minus that of the replaced one, else 0
    keep_ratio: Tensor  # b 1, weight of a sample's own label
    is_easy: Tensor  # b bool
    saliency: Tensor  # b t float32, what was compared


def gaining_tokens(own: Tensor, offered: Tensor, is_easy: Tensor, rho: float) -> Tensor:
    """Marks tokens to replace: the donor's saliency is higher by more than rho (Eq. 9, `eq:mask`).

    `own`, `offered`: `b t`, saliency of the sample and of its donor; rho >= 0. Returns `b t` bool.
    `is_easy` is not needed: a hard sample is its own donor, and 0 > rho is never so.
    """
    return offered - own > rho


def saliency_ratio(saliency: Tensor, mask: Tensor) -> Tensor:
    """Weight of a sample's own label: kept / (kept + taken) saliency, 1 for 0 / 0 (Eq. 11).

    `saliency`: `b t`, of the mixed tokens; `mask`: `b t`, the tokens taken. Returns `b 1`.
    """
    kept = saliency.masked_fill(mask, 0).sum(dim=1, keepdim=True)
    return (kept / saliency.sum(dim=1, keepdim=True)).nan_to_num(1.0)


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
    not `b c`, TypeError if a rule returns another type, FloatingPointError if `rules.match` does.
    Where it does not, so as not to wait for a GPU, saliency that is not finite puts nan in `gain`.
    """
    if targets.ndim != 2 or len(targets) != len(tokens):
        raise ValueError(f"targets {[*targets.shape]}: must be probabilities b c")
    saliency = saliency.detach().float()
    if saliency.shape[1] > tokens.shape[1]:
        raise ValueError(f"saliency of {saliency.shape[1]} tokens, but {tokens.shape[1]} to mix")
    is_easy = difficulty < tau  # 3: Eq. 8
    pair_gain = rules.score(saliency, rho)  # 4: Eq. 6, b b
    donor = rules.match(pair_gain, is_easy)  # 5: Eq. 7, sigma of every sample
    _check_type("match", donor, torch.int64)
    offered = saliency[donor]
    mask = rules.choose(saliency, offered, is_easy, rho)  # Eq. 9
    _check_type("choose", mask, torch.bool)
    if not targets.is_floating_point():
        targets = targets.float()
    mixed_saliency = torch.where(mask, offered, saliency)
    keep_ratio = rules.weigh(mixed_saliency, mask).to(targets.dtype)
    return HorizontalMix(
        tokens=exchanged(tokens, donor, mask),  # 6: Eq. 10
        targets=targets[donor].lerp(targets, keep_ratio),  # 7: Eq. 11
        donor=donor,
        mask=mask,
        gain=mixed_saliency - saliency,
        keep_ratio=keep_ratio,
        is_easy=is_easy,
        saliency=saliency,
    )


def _check_type(rule: str, found: Tensor, dtype: torch.dtype) -> None:
    """Raises TypeError if a rule of `Rules` returns numbers of another type."""
    if found.dtype != dtype:
        raise TypeError(f"{rule}: returns {found.dtype}, must return {dtype}")


def exchanged(tokens: Tensor, donor: Tensor, mask: Tensor) -> Tensor:
    """Returns where(mask, tokens[donor], tokens) by one gather: `b n d`, `b`, `b t` -> `b n d`.

    Every row is read once, kept ones from themselves: reading only replaced rows would make the
    host wait for their number.
    """
    b, n, _ = tokens.shape
    own = torch.arange(b * n, device=mask.device).view(b, n)
    is_taken = F.pad(mask, (n - mask.shape[1], 0))  # b n, never of the prefix
    row = torch.where(is_taken, own[donor], own)
    return tokens.flatten(0, 1).index_select(0, row.flatten()).view_as(tokens)
