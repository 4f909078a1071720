"""What each tau and rho would mix, on real batches of a trained run: by which users choose them.

Letters: b batch, t spatial tokens.
"""

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from reproduction.config import Config
from reproduction.data.build import build_training_inputs
from reproduction.reporting.trained import Trained, block_inputs, load_trained, training_batches
from reproduction.runs.folder import RunFolder
from tokenmixup import HTM, Rules, difficulty, mix_horizontal
from tokenmixup.detectors import detector_of
from tokenmixup.rules import rules_of
from tokenmixup.saliency import input_gradient

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
TAUS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
RHOS = (0.0, 0.001, 0.003, 0.005, 0.01, 0.02)


class Seen(NamedTuple):
    """What HTM would see of one batch at a layer."""

    difficulty: Tensor  # b, nats
    saliency: Tensor  # b t


class Layer(NamedTuple):
    """What is known of one layer; shares are of samples, and of the tokens of an easy one."""

    layer: int
    tau: float  # the run's own
    rho: float
    difficulty: np.ndarray  # nats, at QUANTILES
    difference: np.ndarray  # of saliency, donor's - own, in pairs as they are matched, at QUANTILES
    samples: dict[float, float]  # by tau
    tokens: dict[float, float]  # by rho, at the run's tau, or of all if none is easy there


def suggestions(folder: RunFolder, config: Config, batches: int) -> list[Layer]:
    """Of each layer of a run with HTM, over augmented and mixed training batches, no dropout.

    A later layer is looked at as if earlier ones did not mix. UserError without HTM.
    """
    trained = load_trained(config, folder, config.device)
    assert config.augmentation.htm is not None
    each = config.augmentation.htm.each
    seen: dict[int, list[Seen]] = {layer: [] for layer in each}
    inputs = build_training_inputs(config, len(trained.source.classes), trained.device)
    parts = config.devices * config.recipe.grad_accum_steps  # within which pairs are matched
    size = max(1, config.recipe.batch_size // parts)
    for step, (pixels, classes) in enumerate(training_batches(trained, size, batches)):
        images, targets = inputs(pixels, classes, config.seed, step, 0)
        for layer, htm in each.items():
            seen[layer].append(_seen(trained, layer, htm, images, targets))
    return [_layer(layer, htm, seen[layer]) for layer, htm in each.items()]


@torch.no_grad()
def _seen(trained: Trained, layer: int, htm: HTM, images: Tensor, targets: Tensor) -> Seen:
    module: Any = trained.module
    entry = block_inputs(module.model, images, layer)[layer]
    if htm.detector == "gradient":
        with torch.enable_grad():
            entry.pixels = input_gradient(module.model, images, targets)
    scores = module.scorenets[str(layer)](entry.tokens, entry.num_prefix_tokens)
    return Seen(difficulty(scores, targets).cpu(), detector_of(htm)(entry).float().cpu())


def _layer(layer: int, htm: HTM, seen: list[Seen]) -> Layer:
    tau, rho = cast(float, htm.tau), cast(float, htm.rho)  # of one layer
    nats = torch.cat([one.difficulty for one in seen]).numpy()
    easy = [one.difficulty < tau for one in seen]
    if not any(bool(some.any()) for some in easy):  # then as if all were
        easy = [torch.ones_like(some) for some in easy]
    rules = rules_of(htm)
    found = {value: _pairs(seen, easy, value, rules) for value in sorted({*RHOS, rho})}
    difference = found[rho][1]
    return Layer(
        layer,
        tau,
        rho,
        np.quantile(nats, QUANTILES),
        np.quantile(difference, QUANTILES),
        {value: float(np.mean(nats < value)) for value in sorted({*TAUS, tau})},
        {value: share for value, (share, _) in found.items()},
    )


def _pairs(
    seen: list[Seen], easy: list[Tensor], rho: float, rules: Rules
) -> tuple[float, np.ndarray]:
    """(share of an easy sample's tokens that is replaced, all differences of the pairs)."""
    masks, differences = [], []
    for one, is_easy in zip(seen, easy, strict=True):
        labels = torch.zeros(len(is_easy), 1)
        mix = mix_horizontal(
            one.saliency[..., None], labels, one.saliency, is_easy, rho, rules=rules
        )
        masks.append(mix.mask[is_easy].flatten().float())
        differences.append((one.saliency[mix.donor] - one.saliency)[is_easy].flatten())
    mask = torch.cat(masks)
    return float(mask.mean()), torch.cat(differences).numpy()
