"""Figure 3: saliency of a trained run's tokens by gradient, full rollout and one step.

Letters: b batch, t spatial tokens, h w image.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from reproduction.config import Config
from reproduction.errors import UserError
from reproduction.reporting.figures import figure
from reproduction.reporting.gallery import displayable, some_images
from reproduction.reporting.trained import block_inputs, load_trained
from tokenmixup.detectors import by_gradient, by_rollout
from tokenmixup.saliency import input_gradient

ROWS = 4  # images shown


class SaliencyMaps(NamedTuple):
    """Three saliencies of the same tokens, each `b t`."""

    gradient: Tensor
    full_rollout: Tensor
    one_step: Tensor


def saliency_maps(module: Any, images: Tensor, targets: Tensor) -> SaliencyMaps:
    """Saliency of the tokens that enter the HTM block, `images` `b 3 h w`, `targets` `b c`.

    The full rollout goes on to the last block. ValueError where that is not possible.
    """
    model, layer = module.model.eval(), module.htm.layer
    entry = block_inputs(model, images)[layer]
    entry.pixels = input_gradient(model, images, targets)
    return SaliencyMaps(
        by_gradient(entry), by_rollout(len(model.blocks) - 1 - layer, entry), entry.own_saliency()
    )


def entropy(saliency: Tensor) -> float:
    """Mean entropy over a batch `b t` in nats, of each sample's saliency scaled to sum 1."""
    share = saliency / saliency.sum(dim=1, keepdim=True)
    return float(torch.special.entr(share).sum(dim=1).mean())


def draw_saliency_maps(path: Path, config: Config, last_checkpoint: Path) -> dict[str, float]:
    """Draws a row for each image, min-max scaled; returns the entropy of each saliency.

    UserError for a run without HTM, whose block tells where the tokens are.
    """
    if config.augmentation.htm is None:
        raise UserError(f"{last_checkpoint}: the run was trained without htm")
    module, source = load_trained(config, last_checkpoint)
    images, classes = some_images(config, source)
    maps = saliency_maps(module, images, F.one_hot(classes, len(source.classes)).float())
    sharpness = {name: entropy(saliency) for name, saliency in maps._asdict().items()}
    pictures = displayable(images[:ROWS], config)
    with figure(path, ROWS, 4, figsize=(7, 1.9 * ROWS), squeeze=False) as axes:
        for row, picture, *saliencies in zip(axes, pictures, *maps, strict=False):
            row[0].imshow(picture)
            for ax, saliency in zip(row[1:], saliencies, strict=True):
                ax.imshow(_scaled(saliency), cmap="viridis", vmin=0, vmax=1)
            for ax in row:
                ax.set_axis_off()
        axes[0][0].set_title("input")
        for ax, (name, nats) in zip(axes[0][1:], sharpness.items(), strict=True):
            ax.set_title(f"{name.replace('_', ' ')}\nentropy {nats:.2f} nats")
    return sharpness


def _scaled(saliency: Tensor) -> np.ndarray:
    """`t` -> `g g`, from 0 to 1."""
    g = round(len(saliency) ** 0.5)
    low, high = saliency.aminmax()
    return ((saliency - low) / (high - low).clamp(min=1e-12)).reshape(g, g).numpy()
