"""The shares that each tau and rho would mix on batches of a trained run, to help choose them.

Letters: b batch, t spatial tokens.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from reproduction.config import Config
from reproduction.data.inputs import build_training_inputs
from reproduction.errors import UserError
from reproduction.folder import RunFolder
from reproduction.identity import own_code
from reproduction.reporting.trained import (
    TrainedRun,
    load_trained,
    training_batches,
    with_htm,
)
from tokenmixup import HTM, mix_horizontal
from tokenmixup.rules import rules_of

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
TAUS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # below guessing's, where all samples are easy
RHOS = (0.0, 0.001, 0.003, 0.005, 0.01, 0.02)


class Observed(NamedTuple):
    """What an HTM layer sees of a batch."""

    difficulty: Tensor  # b, in nats
    saliency: Tensor  # b t


class Pairs(NamedTuple):
    """What the pairs of all batches exchange, on average."""

    tokens: float  # the share replaced
    labels: float  # the share given to the donor's classes
    difference: np.ndarray  # saliency of donor - own, of all their tokens


def suggestions(folder: RunFolder, config: Config, batches: int) -> Iterator[str]:
    """Yields tables of each HTM layer of a run, on augmented and mixed batches without dropout.

    Each layer is measured as if earlier ones did not mix. Raises UserError without HTM.
    """
    if config.augmentation.htm is None:
        raise UserError(f"run={folder.path}: was trained without htm")
    for door, path in own_code(config):
        if door.role in ("inputs", "tokens"):
            word = door.word(path)
            raise UserError(f"{word}: pairs are counted here by methods of ours alone")
    trained = load_trained(config, folder)
    htm = trained.module.htm
    assert htm is not None
    observed = _observed(trained, htm, batches)
    guessing = math.log(len(trained.data.classes))
    taus = [tau for tau in TAUS if tau < guessing]
    for layer, settings in htm.by_layer.items():
        yield _tables(layer, settings, observed[layer], taus)


def _observed(trained: TrainedRun, htm: HTM, batches: int) -> dict[int, list[Observed]]:
    """Returns what each HTM layer sees if none of them mixes, batch by batch."""
    config, model = trained.config, trained.module.model
    num_classes = len(trained.data.classes)
    module = with_htm(trained.module, dataclasses.replace(htm, tau=0.0))
    module.scorenets = trained.module.scorenets
    module.train()
    model.eval()
    inputs = build_training_inputs(config, trained.device)
    parts = config.devices * config.recipe.grad_accum_steps  # pairs are matched within each
    size = max(1, config.recipe.batch_size // parts)
    observed = defaultdict[int, list[Observed]](list)
    for step, (pixels, classes) in enumerate(training_batches(trained, size, batches)):
        mixed = inputs(pixels, classes, config.seed, step, 0)
        targets = mixed.targets(num_classes, config.recipe.label_smoothing)
        with torch.no_grad():
            layers = module(mixed.images, targets).layers
        for seen in layers:
            observed[seen.layer].append(Observed(seen.difficulty.cpu(), seen.saliency.cpu()))
    return observed


def _tables(layer: int, htm: HTM, observed: list[Observed], taus: Sequence[float]) -> str:
    """Returns Markdown: quantiles, and shares by tau and by rho; `*` is the run's own.

    Tokens and labels are of the samples that are easy by the run's tau, or of all if none is.
    """
    tau = cast(float, htm.tau)
    rho = htm.rho_for(observed[0].saliency.shape[1])
    difficulty = torch.cat([batch.difficulty for batch in observed]).numpy()
    note = []
    matched = tau  # samples that are easier than this are paired
    if not (difficulty < tau).any():
        note = ["None is easy: tokens and labels below are of all samples."]
        matched = math.inf
    easy = {x: {"easy samples": (difficulty < x).mean()} for x in sorted({*taus, tau})}
    pairs = {x: _pairs(htm, observed, matched, x) for x in sorted({*RHOS, rho, 2 * rho, 4 * rho})}
    exchanged = {
        x: {"tokens replaced": found.tokens, "label given to the donor's": found.labels}
        for x, found in pairs.items()
    }
    texts = [
        f"\nlayer {layer}: tau = {tau:g}, rho = {rho:g}",
        _markdown(_quantiles(difficulty, pairs[rho].difference)),
        *note,
        _markdown(_shares("tau", tau, easy)),
        _markdown(_shares("rho", rho, exchanged)),
    ]
    return "\n\n".join(texts)


def _quantiles(difficulty: np.ndarray, difference: np.ndarray) -> pd.DataFrame:
    rows = {
        "difficulty in nats": [f"{x:.3f}" for x in np.quantile(difficulty, QUANTILES)],
        "saliency of donor - own": [f"{x:+.5f}" for x in np.quantile(difference, QUANTILES)],
    }
    titles = [f"{x:.0%}" for x in QUANTILES]
    return pd.DataFrame.from_dict(rows, orient="index", columns=titles).rename_axis("")


def _shares(name: str, own: float, columns: Mapping[float, Mapping[str, float]]) -> pd.DataFrame:
    """Returns rows of percentages, with a column for each value of tau or rho."""
    shares = pd.DataFrame(columns).map("{:.1%}".format).rename_axis(name)
    return shares.rename(columns=lambda x: f"{x:g} *" if x == own else f"{x:g}")


def _markdown(table: pd.DataFrame) -> str:
    return table.reset_index().to_markdown(index=False, disable_numparse=True)


def _pairs(htm: HTM, observed: list[Observed], tau: float, rho: float) -> Pairs:
    """Pairs the samples of each batch that are easier than tau, as training does."""
    masks, labels, differences = [], [], []
    for difficulty, saliency in observed:
        tokens = saliency[..., None]  # any will do, as will targets
        targets = torch.zeros(len(difficulty), 1)
        mix = mix_horizontal(tokens, targets, saliency, difficulty, tau, rho, rules_of(htm))
        easy = difficulty < tau
        masks.append(mix.mask[easy].flatten().float())
        labels.append(1 - mix.keep_ratio[easy, 0])
        differences.append((saliency[mix.donor] - saliency)[easy].flatten())
    return Pairs(
        tokens=float(torch.cat(masks).mean()),
        labels=float(torch.cat(labels).mean()),
        difference=torch.cat(differences).numpy(),
    )
