"""How HTM chooses: the floor of the difficulty, the half of the label, the place of ScoreNet.

Letters: b batch, c classes, k layers of HTM, p pairs of different classes.
"""

import dataclasses
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.stats import entropy
from torch import Tensor

from reproduction.config import Config
from reproduction.reporting.figures import BLUE, GREEN, ORANGE, VERMILION, figure
from reproduction.reporting.suggestions import RHOS
from reproduction.reporting.trained import load_trained, some_images
from reproduction.runs.folder import RunFolder
from tokenmixup import TokenMixup

IMAGES = 2048  # images of a run
SHOWN_TAUS = (0.5, 1.0, 2.0)  # in the picture


class Seen(NamedTuple):
    """What HTM makes of images at its last layer with tau = inf."""

    difficulty: Tensor  # k b, nats, by the ScoreNet of each layer
    tokens: Tensor  # p, share of the tokens that are the donor's
    label: Tensor  # p, share of the label that is the donor's
    model: Tensor  # p, the model's probability of the donor's class, of that and the own together


def floor(keep: np.ndarray, smoothing: float, classes: int) -> np.ndarray:
    """Returns the smallest difficulty that labels can have, in nats: their entropy.

    `keep`: the weights of the own class; another class has the rest.
    """
    label = np.full((len(keep), classes), smoothing / classes)
    label[:, 0] += (1 - smoothing) * keep
    label[:, 1] += (1 - smoothing) * (1 - keep)
    return entropy(label, axis=1)


def look_at(folder: RunFolder, config: Config) -> tuple[dict[float, Seen], float]:
    """Mixes training images of a run with HTM by each rho; also returns log10(classes)."""
    htm = config.augmentation.htm
    assert htm is not None
    taus = [0.0] * (len(htm.layers) - 1) + [math.inf]
    seen = {}
    for rho in RHOS:
        mixing = dataclasses.replace(htm, tau=taus if len(taus) > 1 else math.inf, rho=rho)
        stack = dataclasses.replace(config.augmentation, htm=mixing)
        own = dataclasses.replace(config, augmentation=stack)
        trained = load_trained(own, folder, config.device)
        images, _, targets = some_images(trained, IMAGES)
        batches = (x.split(config.recipe.batch_size) for x in (images, targets))
        parts = [mixed(trained.module, *batch) for batch in zip(*batches, strict=True)]
        seen[rho] = Seen(*(torch.cat(each, dim=-1).cpu() for each in zip(*parts, strict=True)))
    return seen, math.log10(len(trained.source.classes))


@torch.no_grad()
def mixed(module: TokenMixup, images: Tensor, targets: Tensor) -> Seen:
    """Mixes a batch, `b 3 h w` and labels of one class each, `b c`, without dropout."""
    module.train()
    module.model.eval()
    output = module(images, targets)
    assert output.mask is not None
    pairs = torch.nonzero((output.targets != targets).any(dim=1))[:, 0]
    own, given = targets[pairs].argmax(dim=1), (output.targets - targets)[pairs]
    donor, p = given.argmax(dim=1), torch.arange(len(pairs), device=pairs.device)
    chances = output.logits[pairs].float().softmax(dim=1)
    return Seen(
        torch.stack([layer.difficulty for layer in output.layers]),
        output.mask[pairs].float().mean(dim=1),
        -given[p, own] / (targets[pairs[p], own] - targets[pairs[p], donor]),
        chances[p, donor] / (chances[p, donor] + chances[p, own]),
    )


def share_table(seen: dict[float, Seen]) -> pd.DataFrame:
    """Returns a row for each rho: shares of the donor, with quantiles, and correlations."""
    rows = []
    for rho, each in seen.items():
        tokens, label, model = (pd.Series(x.numpy()) for x in each[1:])
        rows.append(
            {
                "rho": rho,
                "pairs": len(label),
                "of the tokens": _share(tokens),
                "of the label": _share(label),
                "seen by the model": _share(model),
                "r(seen, tokens)": f"{model.corr(tokens):.2f}",
                "r(seen, label)": f"{model.corr(label):.2f}",
            }
        )
    return pd.DataFrame(rows)


def _share(values: pd.Series) -> str:
    low, high = values.quantile([0.05, 0.95])
    return f"{values.mean():.1%} ({low:.0%} to {high:.0%})"


def draw_choice(
    path: Path, seen: dict[float, Seen], layers: list[int], tau: float, smoothing: float
) -> None:
    """Draws the floor over the weight of a class, the shares over rho, and the difficulties."""
    with figure(path, 1, 3, figsize=(11, 3.6)) as (floors, half, place):
        keep = np.linspace(0.5, 1, 101)
        for classes, color in ((100, GREEN), (10, BLUE)):
            label = f"{classes} classes"
            floors.plot(keep, floor(keep, smoothing, classes), color=color, label=label)
        for value in SHOWN_TAUS:
            floors.axhline(value, color=VERMILION, linestyle="--", linewidth=1)
            right = floors.get_yaxis_transform()
            floors.text(
                1.02, value, f"tau = {value:g}", color=VERMILION, va="center", transform=right
            )
        floors.set(title="The floor", xlabel="weight of the larger class in a label")
        floors.set(ylabel="least possible difficulty [nats]", ylim=(0, 2.3))
        floors.legend(loc="lower left")
        for name, color, words in (
            ("label", BLUE, "of the label"),
            ("model", ORANGE, "seen by a model without HTM"),
            ("tokens", GREEN, "of the tokens"),
        ):
            means = [float(getattr(each, name).mean()) for each in seen.values()]
            half.plot([*seen], means, color=color, marker="o", label=words)
        half.set(title="The half", xlabel="rho", ylabel="mean share of the donor", ylim=(0, 0.8))
        half.legend(loc="upper right")
        for layer, nats, color in zip(layers, seen[0].difficulty, (ORANGE, BLUE), strict=False):
            place.ecdf(nats.numpy(), color=color, label=f"htm.layer={layer}")
        place.axvline(tau, color=VERMILION, linestyle="--", linewidth=1, label=f"tau = {tau:g}")
        place.set(title="The place", xlabel="difficulty [nats]", xlim=(0, 3 * tau))
        place.set(ylabel="share of the images below")
        place.legend(loc="lower right")
