"""The shares that each tau and rho would mix on batches of a trained run, to help choose them.

Letters: b batch, t spatial tokens.
"""

from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
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


class Observed(NamedTuple):
    """The inputs of HTM for one batch at a layer."""

    difficulty: Tensor  # b, nats
    saliency: Tensor  # b t


class Layer(NamedTuple):
    """The statistics of one layer; shares are of samples, and of the tokens of an easy sample."""

    layer: int
    tau: float  # the run's own
    rho: float
    difficulty: np.ndarray  # nats, at QUANTILES
    difference: np.ndarray  # saliency of donor - own, over matched pairs, at QUANTILES
    samples: dict[float, float]  # by tau
    tokens: dict[float, float]  # by rho; easy by the run's tau, or all if none is


def suggestions(folder: RunFolder, config: Config, batches: int) -> list[Layer]:
    """Measures each HTM layer of a run on augmented and mixed training batches, without dropout.

    Each layer is measured as if earlier ones did not mix. Raises UserError without HTM.
    """
    trained = load_trained(config, folder, config.device)
    assert trained.module.htm is not None
    each = trained.module.htm.each
    observed: dict[int, list[Observed]] = {layer: [] for layer in each}
    inputs = build_training_inputs(config, trained.device)
    parts = config.devices * config.recipe.grad_accum_steps  # pairs are matched within each
    size = max(1, config.recipe.batch_size // parts)
    for step, (pixels, classes) in enumerate(training_batches(trained, size, batches)):
        mixed = inputs(pixels, classes, config.seed, step, 0)
        targets = mixed.targets(len(trained.source.classes), config.recipe.label_smoothing)
        for layer, htm in each.items():
            observed[layer].append(_observe(trained, layer, htm, mixed.images, targets))
    return [_layer(layer, htm, observed[layer]) for layer, htm in each.items()]


@torch.no_grad()
def _observe(trained: Trained, layer: int, htm: HTM, images: Tensor, targets: Tensor) -> Observed:
    module: Any = trained.module
    entry = block_inputs(module.model, images, layer)[layer]
    if htm.detector == "gradient":
        with torch.enable_grad():
            entry.pixels = input_gradient(module.model, images, targets)
    scores = module.scorenets[str(layer)](entry.tokens, entry.num_prefix_tokens)
    return Observed(difficulty(scores, targets).cpu(), detector_of(htm)(entry).float().cpu())


def _layer(layer: int, htm: HTM, observed: list[Observed]) -> Layer:
    tau, rho = cast(float, htm.tau), htm.rho_for(observed[0].saliency.shape[1])
    nats = torch.cat([one.difficulty for one in observed]).numpy()
    easy = [one.difficulty < tau for one in observed]
    if not any(bool(flags.any()) for flags in easy):
        easy = [torch.ones_like(flags) for flags in easy]
    rules = rules_of(htm)
    pairs = {value: _pairs(observed, easy, value, rules) for value in sorted({*RHOS, rho})}
    return Layer(
        layer,
        tau,
        rho,
        np.quantile(nats, QUANTILES),
        np.quantile(pairs[rho][1], QUANTILES),
        {value: float(np.mean(nats < value)) for value in sorted({*TAUS, tau})},
        {value: share for value, (share, _) in pairs.items()},
    )


def _pairs(
    observed: list[Observed], easy: list[Tensor], rho: float, rules: Rules
) -> tuple[float, np.ndarray]:
    """Returns the share of replaced tokens of easy samples, and all differences of their pairs."""
    masks, differences = [], []
    for one, is_easy in zip(observed, easy, strict=True):
        labels, difficulty = torch.zeros(len(is_easy), 1), (~is_easy).float()
        tokens = one.saliency[..., None]
        mix = mix_horizontal(tokens, labels, one.saliency, difficulty, 1.0, rho, rules)
        masks.append(mix.mask[is_easy].flatten().float())
        differences.append((one.saliency[mix.donor] - one.saliency)[is_easy].flatten())
    mask = torch.cat(masks)
    return float(mask.mean()), torch.cat(differences).numpy()


def as_text(layer: Layer) -> str:
    """Returns Markdown tables: quantiles, samples by tau, tokens by rho; `*` is the run's own."""
    quantiles = {
        "": ["difficulty in nats", "saliency of donor - own"],
        **{
            f"{q:.0%}": [f"{nats:.3f}", f"{gap:+.5f}"]
            for q, nats, gap in zip(QUANTILES, layer.difficulty, layer.difference, strict=True)
        },
    }
    tables = [quantiles]
    for name, label, shares, own in (
        ("tau", "easy samples", layer.samples, layer.tau),
        ("rho", "tokens replaced in each", layer.tokens, layer.rho),
    ):
        columns = {f"{x:g}{' *' * (x == own)}": [f"{share:.1%}"] for x, share in shares.items()}
        tables.append({name: [label], **columns})
    texts = [
        pd.DataFrame(table).to_markdown(
            index=False, disable_numparse=True, colalign=["left", *["right"] * (len(table) - 1)]
        )
        for table in tables
    ]
    title = f"\nlayer {layer.layer}: tau = {layer.tau:g}, rho = {layer.rho:g}"
    return "\n\n".join([title, *texts])
