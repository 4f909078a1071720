"""Measures the effects of the published rules on the saliency of a trained run, or random.

Letters: b batch, t spatial tokens, n tokens with prefix.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from reproduction.config import Config
from reproduction.data.inputs import build_normalize
from reproduction.reporting.trained import block_inputs, load_trained, training_batches
from reproduction.runs.folder import RunFolder
from tokenmixup import (
    HTM,
    HorizontalMix,
    attention_saliency,
    difficulty,
    mix_horizontal,
    rollout_saliency,
)
from tokenmixup.attention import attention_map, positions
from tokenmixup.rules import easy_first, rules_of
from tokenmixup.vertical import indices_without_prefix, salient_indices

BATCHES = 8


class Batch(NamedTuple):
    """The inputs of HTM for one batch."""

    saliency: Tensor  # b t
    is_easy: Tensor  # b bool
    targets: Tensor  # b c
    maps: list[Tensor]  # b h n n, of the HTM block and the next one
    num_prefix_tokens: int
    class_token: bool


def measure(batches: list[Batch], rho: float, kappa: int) -> dict[str, float]:
    """Returns the mean effects over batches: shares, counts of tokens and correlations."""
    rows = [dict(_effects(batch, rho, kappa)) for batch in batches]
    keys = dict.fromkeys(key for row in rows for key in row)  # a batch may lack some
    return {key: float(np.mean([row[key] for row in rows if key in row])) for key in keys}


def _effects(batch: Batch, rho: float, kappa: int) -> Iterator[tuple[str, float]]:
    yield "easy samples", float(batch.is_easy.float().mean())
    yield from _mask_effects(batch, rho)
    rows = torch.arange(len(batch.is_easy))
    moved = easy_first(batch.is_easy) != rows
    yield "order: rows that read another sample's memory", float(moved.float().mean())
    mixed = _mix(batch, rho).tokens[..., 0]
    overlap = _overlap(salient_indices(mixed, kappa), salient_indices(batch.saliency, kappa))
    yield "order: VTM tokens that change at the HTM block", 1 - overlap
    yield from _map_effects(batch, kappa)


def _mask_effects(batch: Batch, rho: float) -> Iterator[tuple[str, float]]:
    paper, published = (_mix(batch, rho, mask_rule=rule) for rule in ("paper", "published"))
    easy = batch.is_easy
    if not easy.any():
        return
    ours, theirs = paper.mask[easy], published.mask[easy]
    yield "mask: tokens replaced per sample, paper", float(ours.sum(dim=1).float().mean())
    yield "mask: tokens replaced per sample, published", float(theirs.sum(dim=1).float().mean())
    yield "mask: tokens with the same decision", float((ours == theirs).float().mean())
    either = (ours | theirs).sum().clamp(min=1)
    yield "mask: overlap of the replaced tokens", float((ours & theirs).sum() / either)
    labels = (paper.targets[easy] - published.targets[easy]).abs().sum(dim=1) / 2
    yield "mask: label mass that moves", float(labels.mean())
    first = paper.targets[easy].argmax(dim=1) != published.targets[easy].argmax(dim=1)
    yield "mask: samples whose first label changes", float(first.float().mean())


def _mix(batch: Batch, rho: float, **settings: Any) -> HorizontalMix:
    tokens = batch.saliency[..., None]  # so that the saliency moves with its token
    rules = rules_of(HTM(layer=0, **settings))
    difficulty = (~batch.is_easy).float()  # 0 or 1, below a tau of 1 or not
    return mix_horizontal(tokens, batch.targets, batch.saliency, difficulty, 1.0, rho, rules)


def _map_effects(batch: Batch, kappa: int) -> Iterator[tuple[str, float]]:
    """Yields the effects that need attention maps or a class token."""
    prefix, t = batch.num_prefix_tokens, batch.saliency.shape[1]
    if len(batch.maps) > 1:
        composed = rollout_saliency(batch.maps, prefix, batch.class_token)
        printed = rollout_saliency(batch.maps[::-1], prefix, batch.class_token)
        yield "rollout of 2 maps: rank correlation of both orders", _correlation(composed, printed)
        one = rollout_saliency(batch.maps[:1], prefix, batch.class_token)
        yield "rollout: rank correlation of one map with two", _correlation(composed, one)
    if batch.class_token:
        rules = (salient_indices, indices_without_prefix)
        paper, published = (rule(batch.saliency, kappa, prefix) for rule in rules)
        yield "class token: VTM's tokens that change", 1 - _overlap(paper, published)
        picked = (published == 0).any(dim=1).float().mean()
        yield "class token: samples whose class token enters VTM", float(picked)
        lost = (paper == t).any(dim=1).float().mean()
        yield "class token: samples whose last patch is lost", float(lost)
    if batch.class_token and batch.maps:
        rows = attention_saliency(batch.maps[0], prefix, class_token=False)
        correlation = _correlation(batch.saliency, rows)
        yield "class token: rank correlation of its row with the mean", correlation


def _overlap(one: Tensor, other: Tensor) -> float:
    """Returns the share of the positions `b k` that the other set contains."""
    return float((one[:, :, None] == other[:, None]).any(dim=2).float().mean())


def _correlation(one: Tensor, other: Tensor) -> float:
    """Returns Spearman's rank correlation, averaged over samples."""
    ranks = [x.argsort(dim=1).argsort(dim=1).float() for x in (one, other)]
    a, b = (F.normalize(rank - rank.mean(dim=1, keepdim=True), dim=1) for rank in ranks)
    return float((a * b).sum(dim=1).mean())


def random_batches(seed: int, b: int = 128, t: int = 64, prefix: int = 0) -> list[Batch]:
    """Draws independent saliencies; half of the samples are easy, and each has one class."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(BATCHES):
        saliency = torch.randn(b, t, generator=generator).softmax(dim=1)
        is_easy = torch.rand(b, generator=generator) < 0.5
        classes = torch.randint(10, (b,), generator=generator)
        targets = F.one_hot(classes, 10).float()
        batches.append(Batch(saliency, is_easy, targets, [], prefix, prefix > 0))
    return batches


def run_batches(folder: RunFolder, config: Config) -> list[Batch]:
    """Reads batches of augmented training images of a run, without input mixup."""
    trained = load_trained(config, folder)
    normalize = build_normalize(config.dataset.mean, config.dataset.std, trained.device)
    batches = training_batches(trained, config.recipe.batch_size, BATCHES)
    return [_batch(trained.module, normalize(pixels), classes) for pixels, classes in batches]


@torch.no_grad()
def _batch(module: Any, images: Tensor, classes: Tensor) -> Batch:
    layer = module.htm.first.layer
    entries = block_inputs(module.model, images, last=layer + 1)[layer:]
    maps = []
    for entry in entries:
        where = positions(entry.parts, entry.tokens.shape[1], entry.given)
        maps.append(attention_map(entry.parts, entry.block.norm(entry.tokens), where=where))
    entry, prefix = entries[0], entries[0].num_prefix_tokens
    targets = F.one_hot(classes, module.scorenet.head.out_features).float()
    is_easy = difficulty(module.scorenet(entry.tokens, prefix), targets) < module.htm.first.tau
    return Batch(entry.own_saliency(), is_easy, targets, maps, prefix, entry.class_token)
