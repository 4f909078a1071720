"""The shares that each tau and rho would mix on batches of a trained run, to help choose them.

Letters: b batch, t spatial tokens.
"""

import dataclasses
import math
from typing import NamedTuple, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from reproduction.config import Config
from reproduction.data.inputs import build_training_inputs
from reproduction.reporting.trained import load_trained, training_batches
from reproduction.runs import RunFolder
from tokenmixup import HTM, attach, mix_horizontal
from tokenmixup.rules import rules_of

SHOWN_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
TAUS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # below guessing's, where all samples are easy
RHOS = (0.0, 0.001, 0.003, 0.005, 0.01, 0.02)
LABEL_GIVEN = "label given to the donor's classes"
Observed = tuple[Tensor, Tensor]  # of a batch: difficulty `b` in nats, saliency `b t`


class Layer(NamedTuple):
    """The statistics of one layer; shares are of samples, and of an easy sample's tokens and label.

    Samples are easy by the run's tau, or all if none is.
    """

    layer: int
    tau: float  # the run's own
    rho: float
    difficulty: pd.Series  # nats, by quantile
    difference: pd.Series  # saliency of donor - own, over matched pairs, by quantile
    samples: pd.Series  # by tau
    tokens: pd.Series  # replaced, by rho
    labels: pd.Series  # given to the donor's classes, by rho
    quarters: pd.Series  # the same by the run's rho, for each quarter of the difficulty


def suggestions(folder: RunFolder, config: Config, batches: int) -> list[Layer]:
    """Measures each HTM layer of a run on augmented and mixed training batches, without dropout.

    Each layer is measured as if earlier ones did not mix. Raises UserError without HTM.
    """
    trained = load_trained(config, folder, config.device)
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
    return [_layer(layer, htm, observed[layer], taus) for layer, htm in each.items()]


def _layer(layer: int, htm: HTM, observed: list[Observed], taus: set[float]) -> Layer:
    tau, rho = cast(float, htm.tau), htm.rho_for(observed[0][1].shape[1])
    nats = torch.cat([difficulty for difficulty, _ in observed]).numpy()
    limit = tau if (nats < tau).any() else float("inf")
    rhos = {*RHOS, rho, 2 * rho, 4 * rho}
    pairs = {value: _pairs(htm, observed, limit, value) for value in sorted(rhos)}
    quarters = pd.qcut(nats[nats < limit], 4, duplicates="drop", precision=2)
    return Layer(
        layer,
        tau,
        rho,
        pd.Series(np.quantile(nats, SHOWN_QUANTILES), SHOWN_QUANTILES),
        pd.Series(np.quantile(pairs[rho].difference, SHOWN_QUANTILES), SHOWN_QUANTILES),
        pd.Series({value: float(np.mean(nats < value)) for value in sorted({*taus, tau})}),
        pd.Series({value: each.tokens for value, each in pairs.items()}),
        pd.Series({value: float(each.labels.mean()) for value, each in pairs.items()}),
        pd.Series(pairs[rho].labels).groupby(quarters, observed=True).mean(),
    )


class _Pairs(NamedTuple):
    tokens: float  # the share replaced
    labels: np.ndarray  # the share given to the donor's classes, of each easy sample
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
    return _Pairs(
        float(torch.cat(masks).mean()), torch.cat(labels).numpy(), torch.cat(differences).numpy()
    )


def as_text(layer: Layer) -> str:
    """Returns Markdown tables: quantiles, shares by tau, rho, difficulty; `*` is the run's own."""
    quantiles = [
        ["difficulty in nats", *map("{:.3f}".format, layer.difficulty)],
        ["saliency of donor - own", *map("{:+.5f}".format, layer.difference)],
    ]
    tables = [
        pd.DataFrame(quantiles, columns=["", *map("{:.0%}".format, SHOWN_QUANTILES)]),
        _shares("tau", layer.tau, {"easy samples": layer.samples}),
        _shares(
            "rho", layer.rho, {"tokens replaced in each": layer.tokens, LABEL_GIVEN: layer.labels}
        ),
    ]
    if len(layer.quarters):  # empty if all are equally difficult
        tables.append(
            _shares("difficulty of the easy, in nats", None, {LABEL_GIVEN: layer.quarters})
        )
    title = f"\nlayer {layer.layer}: tau = {layer.tau:g}, rho = {layer.rho:g}"
    return "\n\n".join(
        [title, *(x.to_markdown(index=False, disable_numparse=True) for x in tables)]
    )


def _shares(name: str, own: float | None, rows: dict[str, pd.Series]) -> pd.DataFrame:
    shares = pd.DataFrame(rows.values(), index=pd.Index(rows, name=name)).map("{:.1%}".format)
    return shares.rename(columns=lambda x: _heading(x) + " *" * (x == own)).reset_index()


def _heading(x: float | pd.Interval) -> str:
    return f"{x.left:.2f} to {x.right:.2f}" if isinstance(x, pd.Interval) else f"{x:g}"
