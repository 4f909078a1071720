"""Alternative rules for Algorithm 1: the ablations of Table 4 and the published code's deviations.

To add a rule, write a function, enter it in its table, and add its name to `settings.py`; see
docs/library.md. Letters: b batch, t spatial tokens.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tokenmixup.assignment import check_finite, optimal_donors
from tokenmixup.horizontal import HorizontalMix, Rules, gaining_tokens, saliency_ratio
from tokenmixup.settings import HTM

Match = Callable[[Tensor, Tensor], Tensor]
Choice = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def rules_of(htm: HTM) -> Rules:
    """Returns the configured rules."""
    choose = MASK_RULES[htm.mask_rule]
    if htm.detector == "random":
        choose = partial(random_tokens, choose)
    return Rules(match=MATCHINGS[htm.matching], choose=choose, weigh=LABELS[htm.labels])


@torch.no_grad()
def random_donors(gain: Tensor, is_easy: Tensor) -> Tensor:
    """Returns a random donor for each easy sample, no donor twice: `b` int64.

    Raises FloatingPointError if the gain of an easy sample is not finite, but neither where it is
    compiled nor on a GPU.
    """
    if gain.device.type == "cpu" and not torch.compiler.is_compiling():
        check_finite(gain[is_easy])
    own = torch.arange(len(is_easy), device=is_easy.device)
    drawn = torch.randperm(len(is_easy), device=is_easy.device)
    return torch.where(is_easy, drawn, own)


def random_tokens(
    rule: Choice, own: Tensor, offered: Tensor, is_easy: Tensor, rho: float
) -> Tensor:
    """Draws as many tokens at random as a rule would replace: `b t` bool."""
    count = rule(own, offered, is_easy, rho).sum(dim=1, keepdim=True)
    rank = torch.rand_like(own).argsort(dim=1).argsort(dim=1)
    return rank < count


def count_ratio(saliency: Tensor, mask: Tensor) -> Tensor:
    """Weight of a sample's own label: the share of tokens kept, `b 1`."""
    return 1 - mask.float().mean(dim=1, keepdim=True)


def gaining_over_the_first(own: Tensor, offered: Tensor, is_easy: Tensor, rho: float) -> Tensor:
    """The published mask, `b t`: compares every donor with the first easy sample of the batch.

    That code gathers the receivers' saliency by an index of batch size 1, and so reads the first
    one's for all. Labels follow the same mask.
    """
    first = is_easy.int().argmax(dim=0, keepdim=True)  # argmax returns the first maximum
    return is_easy[:, None] & (offered - own[first] > rho)


def in_published_order(mix: HorizontalMix) -> HorizontalMix:
    """The published order: moves easy samples to the front, tokens and targets, and nothing else.

    VTM's memory of earlier blocks is not reordered, nor is the saliency by which VTM selects tokens
    at this block: both then belong to other samples.
    """
    order = (~mix.is_easy).to(torch.uint8).argsort(stable=True)
    return mix._replace(tokens=mix.tokens[order], targets=mix.targets[order])


MATCHINGS: dict[str, Match] = {
    "optimal": optimal_donors,
    "random": random_donors,  # Table 4, without the optimal assignment
}
MASK_RULES: dict[str, Choice] = {
    "paper": gaining_tokens,
    "published": gaining_over_the_first,
}
LABELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "saliency": saliency_ratio,
    "count": count_ratio,  # Table 4, without saliency in the labels
}
