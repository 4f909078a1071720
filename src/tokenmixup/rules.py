"""Alternative rules for Algorithm 1: the ablations of Table 4 and the published code's deviations.

To add a rule, write a function, enter it in its table, and add its name to `settings.py`; see
docs/library.md. Letters: b batch, t spatial tokens.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmixup.assignment import (
    Match,
    check_finite,
    easy_rows,
    gain_matrix,
    on_host,
    optimal_donors,
)
from tokenmixup.detectors import DETECTORS
from tokenmixup.device import has_kernels
from tokenmixup.horizontal import (
    HorizontalMix,
    Rules,
    gaining_tokens,
    rows_of,
    saliency_ratio,
)
from tokenmixup.settings import HTM

Choice = Callable[[Tensor, Tensor, Tensor, float], Tensor]


class Masking(NamedTuple):
    """Which tokens a receiver takes, and what every pair gains by that."""

    choose: Choice
    score: Callable[[Tensor, float], Tensor] = gain_matrix


def rules_of(htm: HTM) -> Rules:
    """Returns the configured rules."""
    choose, score = MASK_RULES[htm.mask_rule]
    if htm.detector == "random":
        choose = partial(random_tokens, choose)
    return Rules(
        score=score,
        match=MATCHINGS[htm.matching],
        choose=choose,
        weigh=LABELS[htm.labels],
    )


@torch.no_grad()
def random_donors(gain: Tensor, is_easy: Tensor) -> Tensor:
    """Returns a random donor for each easy sample, no donor twice: `b` int64.

    A gain of an easy sample that is not finite is told as by `optimal_donors`.
    """
    return drawn_on_device(gain, is_easy) if has_kernels(gain) else drawn_on_host(gain, is_easy)


@on_host
def drawn_on_host(gain: Tensor, is_easy: Tensor) -> Tensor:
    check_finite(easy_rows(gain, is_easy)[1])
    return _drawn(is_easy)


def drawn_on_device(gain: Tensor, is_easy: Tensor) -> Tensor:
    failed = ~gain.isfinite() & is_easy[:, None]
    return _drawn(is_easy).masked_fill(failed.any() & is_easy, -1)


def _drawn(is_easy: Tensor) -> Tensor:
    b, device = len(is_easy), is_easy.device
    return torch.where(is_easy, torch.randperm(b, device=device), torch.arange(b, device=device))


def random_tokens(
    count_by: Choice, own: Tensor, offered: Tensor, is_easy: Tensor, rho: float
) -> Tensor:
    """Draws as many tokens at random as `count_by` would replace: `b t` bool."""
    count = count_by(own, offered, is_easy, rho).sum(dim=1, keepdim=True)
    rank = torch.rand_like(own).argsort(dim=1).argsort(dim=1)
    return rank < count


def count_ratio(saliency: Tensor, mask: Tensor) -> Tensor:
    """Weight of a sample's own label: the share of tokens kept, `b 1`."""
    return 1 - mask.float().mean(dim=1, keepdim=True)


def gaining_over_the_first(own: Tensor, offered: Tensor, is_easy: Tensor, rho: float) -> Tensor:
    """The published mask, `b t`: compares every donor with the first easy sample of the batch.

    The index of its gather has batch size 1. Labels follow the same mask.
    """
    first = is_easy.int().argmax(dim=0, keepdim=True)  # argmax returns the first maximum
    return is_easy[:, None] & (offered - own[first] > rho)


def in_place(mix: HorizontalMix) -> HorizontalMix:
    """Keeps every sample at its place in the batch (Algorithm 1, line 8)."""
    return mix


def in_published_order(mix: HorizontalMix) -> HorizontalMix:
    """Moves easy samples to the front: tokens, targets and `rows`, and nothing else.

    VTM's memory of earlier blocks is not reordered, nor is the saliency by which VTM selects tokens
    at this block: both then belong to other samples.
    """
    order = (~mix.is_easy).to(torch.uint8).argsort(stable=True)
    rows = mix.rows
    if rows is None:
        rows = rows_of(mix.donor, mix.mask, mix.tokens.shape[1])
    rows = rows.view(len(order), -1)[order].flatten()
    return mix._replace(tokens=mix.tokens[order], targets=mix.targets[order], rows=rows)


MATCHINGS: dict[str, Match] = {
    "optimal": optimal_donors,
    "random": random_donors,  # Table 4, without the optimal assignment
}
MASK_RULES: dict[str, Masking] = {
    "paper": Masking(gaining_tokens),
    "published": Masking(gaining_over_the_first),
}
LABELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "saliency": saliency_ratio,
    "count": count_ratio,  # Table 4, without saliency in the labels
}
ORDERS: dict[str, Callable[[HorizontalMix], HorizontalMix]] = {
    "in_place": in_place,
    "published": in_published_order,
}

# option of HTM -> its table, whose first entry is the default
CHOICES: dict[str, Mapping[str, Any]] = {
    "detector": DETECTORS,
    "matching": MATCHINGS,
    "mask_rule": MASK_RULES,
    "labels": LABELS,
    "order": ORDERS,
}
