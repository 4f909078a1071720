"""The shares that each tau and rho would mix on batches of a trained run, to help choose them.

Letters: b batch, t spatial tokens.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from reproduction.config import Config
from reproduction.data.inputs import build_training_inputs
from reproduction.folder import RunFolder
from reproduction.reporting.trained import load_trained, training_batches
from tokenmixup import HTM, attach, mix_horizontal
from tokenmixup.rules import rules_of

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
TAUS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # below guessing's, where all samples are easy
RHOS = (0.0, 0.001, 0.003, 0.005, 0.01, 0.02)
Observed = tuple[Tensor, Tensor]  # of a batch: difficulty `b` in nats, saliency `b t`


def suggestions(folder: RunFolder, config: Config, batches: int) -> Iterator[str]:
    """Yields tables of each HTM layer of a run, on augmented and mixed batches without dropout.

    Each layer is measured as if earlier ones did not mix. Raises UserError without HTM.
    """
    trained = load_trained(config, folder)
    htm, model = trained.module.htm, trained.module.model
    assert htm is not None
    each = htm.each
    nothing = dataclasses.replace(htm, tau=[0.0] * len(each) if len(each) > 1 else 0.0)
    module = attach(model, len(trained.source.classes), htm=nothing)
    module.scorenets = trained.module.scorenets
    module.train()
    model.eval()
    observed: dict[int, list[Observed]] = {layer: [] for layer in each}
    inputs = build_training_inputs(config, trained.device)
    parts = config.devices * config.recipe.grad_accum_steps  # pairs are matched within each
    size = max(1, config.recipe.batch_size // parts)
    for step, (pixels, classes) in enumerate(training_batches(trained, size, batches)):
        mixed = inputs(pixels, classes, config.seed, step, 0)
        targets = mixed.targets(len(trained.source.classes), config.recipe.label_smoothing)
        with torch.no_grad():
            for seen in module(mixed.images, targets).layers:
                observed[seen.layer].append((seen.difficulty.cpu(), seen.saliency.cpu()))
    taus = {tau for tau in TAUS if tau < math.log(len(trained.source.classes))}
    yield from (_tables(layer, htm, observed[layer], taus) for layer, htm in each.items())


def _tables(layer: int, htm: HTM, observed: list[Observed], taus: set[float]) -> str:
    """Returns Markdown: quantiles, and shares by tau and by rho; `*` is the run's own.

    Tokens and labels are of the samples that are easy by the run's tau, or of all if none is.
    """
    tau, rho = cast(float, htm.tau), htm.rho_for(observed[0][1].shape[1])
    nats = torch.cat([difficulty for difficulty, _ in observed]).numpy()
    is_any = bool((nats < tau).any())
    rhos = sorted({*RHOS, rho, 2 * rho, 4 * rho})
    pairs = {x: _pairs(htm, observed, tau if is_any else math.inf, x) for x in rhos}
    difficulty, gap = (np.quantile(x, QUANTILES) for x in (nats, pairs[rho].difference))
    quantiles = [["difficulty in nats", *map("{:.3f}".format, difficulty)]]
    quantiles.append(["saliency of donor - own", *map("{:+.5f}".format, gap)])
    easy = {x: float((nats < x).mean()) for x in sorted({*taus, tau})}
    tokens = {x: each.tokens for x, each in pairs.items()}
    labels = {x: each.labels for x, each in pairs.items()}
    tables = [
        pd.DataFrame(quantiles, columns=["", *map("{:.0%}".format, QUANTILES)]),
        _shares("tau", tau, {"easy samples": easy}),
        _shares("rho", rho, {"tokens replaced": tokens, "label given to the donor's": labels}),
    ]
    texts = [x.to_markdown(index=False, disable_numparse=True) for x in tables]
    if not is_any:
        texts.insert(1, "None is easy: tokens and labels below are of all samples.")
    return "\n\n".join([f"\nlayer {layer}: tau = {tau:g}, rho = {rho:g}", *texts])


def _shares(name: str, own: float, rows: Mapping[str, Mapping[float, float]]) -> pd.DataFrame:
    shares = pd.DataFrame(rows).T.map("{:.1%}".format).rename_axis(name)
    return shares.rename(columns={x: f"{x:g}" + " *" * (x == own) for x in shares}).reset_index()


class _Pairs(NamedTuple):
    tokens: float  # the share replaced
    labels: float  # the share given to the donor's classes
    difference: np.ndarray  # saliency of donor - own, of all their tokens


def _pairs(htm: HTM, observed: list[Observed], tau: float, rho: float) -> _Pairs:
    """Pairs the samples of each batch that are easier than tau, as training does."""
    masks, labels, differences = [], [], []
    for nats, saliency in observed:
        tokens, no_targets = saliency[..., None], torch.zeros(len(nats), 1)
        mix = mix_horizontal(tokens, no_targets, saliency, nats, tau, rho, rules_of(htm))
        easy = nats < tau
        masks.append(mix.mask[easy].flatten().float())
        labels.append(1 - mix.keep_ratio[easy, 0])
        differences.append((saliency[mix.donor] - saliency)[easy].flatten())
    tokens_mixed, label = (float(torch.cat(x).mean()) for x in (masks, labels))
    return _Pairs(tokens_mixed, label, torch.cat(differences).numpy())
