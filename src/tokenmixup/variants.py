"""Single rules of HTM, replaced: Table 4's ablations, and what the published code does otherwise.

`rules_of` chooses once, when a module is built. Letters: b batch, t spatial tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmixup.horizontal import (
    HTM,
    HorizontalMix,
    gaining_tokens,
    mix_horizontal,
    optimal_donors,
    saliency_ratio,
)

Choice = Callable[[Tensor, Tensor, Tensor, float], Tensor]


class Arranged(NamedTuple):
    """What goes on through the network after mixing."""

    tokens: Tensor  # b n d
    targets: Tensor  # b c
    saliency: Tensor | None  # b t, of these tokens; None where nobody asks
    projected: Sequence[Tensor]  # b n k, of these tokens; empty where they are not known


class Rules(NamedTuple):
    """How HTM works in one module."""

    find_easy: Callable[[Tensor], Tensor]  # difficulty b -> b bool
    mix: Callable[..., HorizontalMix]  # tokens, targets, saliency, is_easy
    arrange: Callable[[HorizontalMix, Tensor, Tensor | None, Sequence[Tensor]], Arranged]


def rules_of(htm: HTM) -> Rules:
    """The rules that the settings choose."""
    choose: Choice = gaining_tokens if htm.mask_rule == "paper" else gaining_over_the_first
    if htm.detector == "random" or htm.ablate == "tokens":  # one and the same: 83.05 % in both
        choose = partial(random_tokens, choose)
    pair: Callable[[Tensor, Tensor, float], Tensor] = partial(
        optimal_donors, non_finite=htm.non_finite
    )
    if htm.ablate == "assignment":
        pair = random_donors
    return Rules(
        find_easy=all_samples if htm.ablate == "scorenet" else partial(easier_than, htm.tau),
        mix=partial(
            mix_horizontal,
            rho=htm.rho,
            pair=pair,
            choose=choose,
            weigh=count_ratio if htm.ablate == "labels" else saliency_ratio,
        ),
        arrange=in_place if htm.order == "in_place" else easy_first,
    )


def easier_than(tau: float, difficulty: Tensor) -> Tensor:
    """Easy samples (Eq. 8): difficulty `b` in nats below tau."""
    return difficulty < tau


def all_samples(difficulty: Tensor) -> Tensor:
    """Ablates ScoreNet: every sample is mixed; its loss stays."""
    return torch.ones_like(difficulty, dtype=torch.bool)


def random_donors(saliency: Tensor, is_easy: Tensor, rho: float) -> Tensor:
    """Ablates the assignment: a random donor for each easy sample, no donor twice: `b` int64."""
    b, device = len(saliency), saliency.device
    return torch.where(is_easy, torch.randperm(b, device=device), torch.arange(b, device=device))


def random_tokens(
    count_by: Choice, saliency: Tensor, donor: Tensor, is_easy: Tensor, rho: float
) -> Tensor:
    """Ablates the choice of tokens: as many as `count_by` replaces, drawn at random: `b t`."""
    count = count_by(saliency, donor, is_easy, rho).sum(dim=1, keepdim=True)
    rank = torch.rand_like(saliency).argsort(dim=1).argsort(dim=1)
    return rank < count


def count_ratio(own: Tensor, taken: Tensor, mask: Tensor) -> Tensor:
    """Ablates saliency in labels: the share of tokens that stay, `b 1`."""
    return 1 - mask.float().mean(dim=1, keepdim=True)


def gaining_over_the_first(saliency: Tensor, donor: Tensor, is_easy: Tensor, rho: float) -> Tensor:
    """The published mask: every donor is compared with the first easy sample of the batch, `b t`.

    Its gather's index has batch size 1. Labels follow the same mask.
    """
    b = len(saliency)
    places = torch.arange(b, device=is_easy.device)
    first = torch.where(is_easy, places, b - 1).amin(dim=0, keepdim=True)  # stays on the device
    return is_easy[:, None] & (saliency[donor] - saliency[first] > rho)


def in_place(
    mix: HorizontalMix,
    is_easy: Tensor,
    saliency: Tensor | None,
    projected: Sequence[Tensor],
) -> Arranged:
    """Mixed samples return to their places (Algorithm 1, line 8); saliency moves with its token."""
    if saliency is not None:
        saliency = torch.where(mix.mask, saliency[mix.donor], saliency)
    return Arranged(mix.tokens, mix.targets, saliency, projected)


def easy_first(
    mix: HorizontalMix,
    is_easy: Tensor,
    saliency: Tensor | None,
    projected: Sequence[Tensor],
) -> Arranged:
    """The published order: easy samples move to the front, in batch order, then the others.

    Targets move along. VTM's memory of earlier blocks stays where it was, and the saliency by which
    VTM chooses at this block is that from before mixing: both then belong to other samples.
    """
    order = (~is_easy).to(torch.uint8).argsort(stable=True)
    projected = [y[order] for y in projected]
    return Arranged(mix.tokens[order], mix.targets[order], saliency, projected)
