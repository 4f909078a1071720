"""Alternative rules for Algorithm 1: the ablations of Table 4 and the published code's deviations.

A rule is a function of `Samples`; `settings.py` has the tables of ours. Letters: b batch, t spatial
tokens.
"""

from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from tokenmixup.horizontal import HorizontalMix, Rule, Rules, Samples
from tokenmixup.settings import HTM, RULES


def rule_of(htm: HTM, key: str) -> Any:
    """Returns the function that a setting names, or is."""
    chosen = getattr(htm, key)
    return resolve_name(RULES[key][chosen]) if isinstance(chosen, str) else chosen


def rules_of(htm: HTM) -> Rules:
    """Returns the configured rules."""
    choose = rule_of(htm, "mask_rule")
    if htm.detector == "random":
        choose = partial(random_tokens, choose)
    return Rules(match=rule_of(htm, "matching"), choose=choose, weigh=rule_of(htm, "labels"))


@torch.no_grad()
def random_donors(samples: Samples) -> Tensor:
    """Returns a random donor for each easy sample, no donor twice: `b` int64."""
    is_easy = samples.is_easy
    own = torch.arange(len(is_easy), device=is_easy.device)
    drawn = torch.randperm(len(is_easy), device=is_easy.device)
    return torch.where(is_easy, drawn, own)


def random_tokens(rule: Rule, samples: Samples) -> Tensor:
    """Draws as many tokens at random as a rule would replace: `b t` bool."""
    count = rule(samples).sum(dim=1, keepdim=True)
    rank = torch.rand_like(samples.saliency).argsort(dim=1).argsort(dim=1)
    return rank < count


def count_ratio(samples: Samples) -> Tensor:
    """Weight of a sample's own label: the share of tokens kept, `b 1`."""
    return 1 - samples.mask.float().mean(dim=1, keepdim=True)


def gaining_over_the_first(samples: Samples) -> Tensor:
    """The published mask, `b t`: compares every donor with the first easy sample of the batch.

    That code gathers the receivers' saliency by an index of batch size 1, and so reads the first
    one's for all. Labels follow the same mask.
    """
    is_easy = samples.is_easy
    first = is_easy.int().argmax(dim=0, keepdim=True)  # argmax returns the first maximum
    return is_easy[:, None] & (samples.offered - samples.saliency[first] > samples.rho)


def in_published_order(mix: HorizontalMix) -> HorizontalMix:
    """The published order: moves easy samples to the front, tokens and targets, and nothing else.

    VTM's memory of earlier blocks is not reordered, nor is the saliency by which VTM selects tokens
    at this block: both then belong to other samples.
    """
    order = (~mix.is_easy).to(torch.uint8).argsort(stable=True)
    return mix._replace(tokens=mix.tokens[order], targets=mix.targets[order])
