"""The shares that each tau and rho would mix on batches of a trained run, to help choose them.

Letters: b batch, t spatial tokens.
"""

from typing import NamedTuple, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from reproduction.config import Config
from reproduction.data.build import build_training_inputs
from reproduction.reporting.trained import load_trained, observe, training_batches
from reproduction.runs.folder import RunFolder
from tokenmixup import HTM, difficulty, mix_horizontal
from tokenmixup.rules import rules_of

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
TAUS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
RHOS = (0.0, 0.001, 0.003, 0.005, 0.01, 0.02)
Observed = tuple[Tensor, Tensor]  # of a batch: difficulty `b` in nats, saliency `b t`


class Layer(NamedTuple):
    """The statistics of one layer; shares are of samples, and of the tokens of an easy sample."""

    layer: int
    tau: float  # the run's own
    rho: float
    difficulty: pd.Series  # nats, by quantile
    difference: pd.Series  # saliency of donor - own, over matched pairs, by quantile
    samples: pd.Series  # by tau
    tokens: pd.Series  # by rho; easy by the run's tau, or all if none is


def suggestions(folder: RunFolder, config: Config, batches: int) -> list[Layer]:
    """Measures each HTM layer of a run on augmented and mixed training batches, without dropout.

    Each layer is measured as if earlier ones did not mix. Raises UserError without HTM.
    """
    trained = load_trained(config, folder, config.device)
    assert trained.module.htm is not None
    each, scorenets = trained.module.htm.each, trained.module.scorenets
    observed: dict[int, list[Observed]] = {layer: [] for layer in each}
    inputs = build_training_inputs(config, trained.device)
    parts = config.devices * config.recipe.grad_accum_steps  # pairs are matched within each
    size = max(1, config.recipe.batch_size // parts)
    for step, (pixels, classes) in enumerate(training_batches(trained, size, batches)):
        mixed = inputs(pixels, classes, config.seed, step, 0)
        targets = mixed.targets(len(trained.source.classes), config.recipe.label_smoothing)
        for layer in each:
            entry, saliency = observe(trained.module, layer, mixed.images, targets)
            with torch.no_grad():
                scores = scorenets[str(layer)](entry.tokens, entry.num_prefix_tokens)
            observed[layer].append((difficulty(scores, targets).cpu(), saliency))
    return [_layer(layer, htm, observed[layer]) for layer, htm in each.items()]


def _layer(layer: int, htm: HTM, observed: list[Observed]) -> Layer:
    tau, rho = cast(float, htm.tau), htm.rho_for(observed[0][1].shape[1])
    nats = torch.cat([difficulty for difficulty, _ in observed]).numpy()
    limit = tau if (nats < tau).any() else float("inf")
    pairs = {value: _pairs(htm, observed, limit, value) for value in sorted({*RHOS, rho})}
    return Layer(
        layer,
        tau,
        rho,
        pd.Series(np.quantile(nats, QUANTILES), QUANTILES),
        pd.Series(np.quantile(pairs[rho][1], QUANTILES), QUANTILES),
        pd.Series({value: float(np.mean(nats < value)) for value in sorted({*TAUS, tau})}),
        pd.Series({value: share for value, (share, _) in pairs.items()}),
    )


def _pairs(htm: HTM, observed: list[Observed], tau: float, rho: float) -> tuple[float, np.ndarray]:
    """Returns the share of replaced tokens of easy samples, and all differences of their pairs."""
    masks, differences = [], []
    for nats, saliency in observed:
        tokens, labels = saliency[..., None], torch.zeros(len(nats), 1)
        mix = mix_horizontal(tokens, labels, saliency, nats, tau, rho, rules_of(htm))
        masks.append(mix.mask[nats < tau].flatten().float())
        differences.append((saliency[mix.donor] - saliency)[nats < tau].flatten())
    return float(torch.cat(masks).mean()), torch.cat(differences).numpy()


def as_text(layer: Layer) -> str:
    """Returns Markdown tables: quantiles, samples by tau, tokens by rho; `*` is the run's own."""
    quantiles = [
        ["difficulty in nats", *map("{:.3f}".format, layer.difficulty)],
        ["saliency of donor - own", *map("{:+.5f}".format, layer.difference)],
    ]
    tables = [
        pd.DataFrame(quantiles, columns=["", *map("{:.0%}".format, QUANTILES)]),
        _shares("tau", "easy samples", layer.samples, layer.tau),
        _shares("rho", "tokens replaced in each", layer.tokens, layer.rho),
    ]
    title = f"\nlayer {layer.layer}: tau = {layer.tau:g}, rho = {layer.rho:g}"
    return "\n\n".join(
        [title, *(x.to_markdown(index=False, disable_numparse=True) for x in tables)]
    )


def _shares(name: str, label: str, shares: pd.Series, own: float) -> pd.DataFrame:
    columns = [f"{value:g}{' *' * (value == own)}" for value in shares.index]
    return pd.DataFrame([[label, *map("{:.1%}".format, shares)]], columns=[name, *columns])
