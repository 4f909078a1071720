"""Horizontal TokenMixup: easy samples take salient tokens from other samples (Algorithm 1).

Letters: b batch, n tokens with prefix, t spatial tokens, d width, c classes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
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
    difficulty: Tensor  # b, with the targets before mixing
    saliency: Tensor  # b t float32, what was compared, before mixing
    layer: int | None = None  # of a training pass
    score_logits: Tensor | None = None  # b c, of its ScoreNet


@dataclass(eq=False)
class Samples:
    """A batch at a layer of HTM, as far as Algorithm 1 has come: what rules are functions of.

    The last four are there once the rules that they come from have been called.
    """

    tokens: Tensor  # b n d; the last t of a sample are the spatial ones
    targets: Tensor  # b c
    saliency: Tensor  # b t float32
    is_easy: Tensor  # b bool
    rho: float
    grid: tuple[int, int] | None  # rows and columns of the spatial tokens, if known
    gain: Tensor  # b b, of every pair, receiver x donor
    donor: Tensor = field(init=False)  # b int64
    offered: Tensor = field(init=False)  # b t, saliency of the donors' tokens
    mask: Tensor = field(init=False)  # b t bool
    mixed_saliency: Tensor = field(init=False)  # b t, of the tokens after the exchange


def optimal_matching(samples: Samples) -> Tensor:
    """Donors by optimal assignment (Eq. 7), `b` int64; a hard sample's is itself."""
    return optimal_donors(samples.gain, samples.is_easy)


def gaining_tokens(samples: Samples) -> Tensor:
    """Marks tokens to replace: the donor's saliency is higher by more than rho (Eq. 9, `eq:mask`).

    Returns `b t` bool. A hard sample is its own donor, and 0 > rho is never so.
    """
    return samples.offered - samples.saliency > samples.rho


def saliency_ratio(samples: Samples) -> Tensor:
    """Weight of a sample's own label: kept / (kept + taken) saliency, 1 for 0 / 0 (Eq. 11).

    Returns `b 1`.
    """
    mixed = samples.mixed_saliency
    kept = mixed.masked_fill(samples.mask, 0).sum(dim=1, keepdim=True)
    return (kept / mixed.sum(dim=1, keepdim=True)).nan_to_num(1.0)


Rule = Callable[[Samples], Tensor]


class Rules(NamedTuple):
    """The exchangeable parts of Algorithm 1, by default the paper's; `rules.py` has others."""

    # saliency b t, rho -> gain b b of every pair, receiver x donor
    score: Callable[[Tensor, float], Tensor] = gain_matrix
    match: Rule = optimal_matching  # donor b int64, a hard sample's is itself
    choose: Rule = gaining_tokens  # mask b t bool, True: take the donor's token
    weigh: Rule = saliency_ratio  # keep_ratio b 1


PAPER = Rules()


def mix_horizontal(
    tokens: Tensor,
    targets: Tensor,
    saliency: Tensor,
    difficulty: Tensor,
    tau: float,
    rho: float,
    rules: Rules = PAPER,
    grid: tuple[int, int] | None = None,
) -> HorizontalMix:
    """Mixes tokens and labels of the easy samples of a batch: Algorithm 1, line by line.

    `tokens`: `b n d`; the first `n - t`, the prefix, are never replaced. `targets`: `b c`.
    `saliency`: `b t`, of the spatial tokens (line 2, Eq. 3). `difficulty`: `b`, in nats (line 1,
    Eq. 1); samples below `tau` are easy. `rho` >= 0: the gain in saliency above which a token is
    replaced. `grid`: rows and columns of the spatial tokens, for rules. Samples stay at their
    places (line 8). Raises FloatingPointError if `rules.match` does. Where it does not, so as not
    to wait for a GPU, saliency that is not finite puts nan in `gain`.
    """
    saliency = saliency.detach().float()
    if not targets.is_floating_point():
        targets = targets.float()
    samples = Samples(
        tokens=tokens,
        targets=targets,
        saliency=saliency,
        is_easy=difficulty < tau,  # 3: Eq. 8
        rho=rho,
        grid=grid,
        gain=rules.score(saliency, rho),  # 4: Eq. 6
    )
    donor = rules.match(samples)  # 5: Eq. 7, sigma
    samples.donor = donor
    samples.offered = saliency[donor]
    mask = rules.choose(samples)  # Eq. 9
    samples.mask = mask
    samples.mixed_saliency = torch.where(mask, samples.offered, saliency)
    keep_ratio = rules.weigh(samples).to(targets.dtype)
    return HorizontalMix(
        tokens=exchanged(tokens, donor, mask),  # 6: Eq. 10
        targets=targets[donor].lerp(targets, keep_ratio),  # 7: Eq. 11
        donor=donor,
        mask=mask,
        gain=samples.mixed_saliency - saliency,
        keep_ratio=keep_ratio,
        is_easy=samples.is_easy,
        difficulty=difficulty,
        saliency=saliency,
    )


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
