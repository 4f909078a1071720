"""Figure 3: saliency of a trained run's tokens by gradient, full rollout and one step.

Letters: b batch, t spatial tokens, h w image.
"""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reproduction.config import Config
from reproduction.errors import UserError
from reproduction.reporting.figures import ROLLOUT_IS_ONE_STEP, figure
from reproduction.reporting.trained import (
    Sample,
    Trained,
    batch_size,
    block_inputs,
    displayable,
    load_trained,
    some_images,
)
from reproduction.runs import RunFolder
from reproduction.storage import write_text
from tokenmixup.detectors import BlockInput, Detector, by_gradient, by_rollout
from tokenmixup.saliency import input_gradient
from tokenmixup.structure import check_rollout

ROWS = 4  # images shown
AT_ONCE = 16  # images whose gradients are held in memory


def saliency_maps(module: Any, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Saliencies of the tokens that enter the HTM block, each `b t`, by what tells them.

    `images` `b 3 h w`, `targets` `b c`. `full_rollout` goes on to the last block, and is left out
    where that is the HTM block itself: it would be `one_step`. ValueError where it is not possible.
    """
    model, layer = module.model.eval(), module.htm.layer
    steps = len(model.blocks) - 1 - layer
    check_rollout(model, layer, steps)
    detectors: dict[str, Detector] = {"gradient": by_gradient}
    if steps > 0:
        detectors["full_rollout"] = partial(by_rollout, steps)
    detectors["one_step"] = BlockInput.own_saliency
    parts: dict[str, list[Tensor]] = {name: [] for name in detectors}
    for some, labels in zip(images.split(AT_ONCE), targets.split(AT_ONCE), strict=True):
        entry = block_inputs(model, some, layer)[layer]
        entry.pixels = input_gradient(model, some, labels)
        for name, detect in detectors.items():
            parts[name].append(detect(entry).cpu())
    return {name: torch.cat(maps) for name, maps in parts.items()}


def entropy(saliency: Tensor) -> float:
    """Mean entropy over a batch `b t` in nats, of each sample's saliency scaled to sum 1."""
    share = saliency / saliency.sum(dim=1, keepdim=True)
    return float(torch.special.entr(share).sum(dim=1).mean())


def draw_figure3(
    path: Path, config: Config, folder: RunFolder, count: int | None
) -> dict[str, float]:
    """draw_saliency_maps of a run over `count` images; UserError if it cannot be done."""
    if config.augmentation.htm is None:
        raise UserError(f"{folder.path}: the run was trained without htm")
    trained = load_trained(config, folder, config.device)
    try:
        return draw_saliency_maps(path, trained, some_images(trained, count or batch_size(trained)))
    except ValueError as error:
        raise UserError(f"{folder.path}: {error}") from error


def draw_saliency_maps(path: Path, trained: Trained, sample: Sample) -> dict[str, float]:
    """Draws a row for each of the first images, min-max scaled.

    Returns the mean entropy of each saliency over the sample, and of a uniform one, in nats, and
    writes them to a .json beside `path`. ValueError where the model has no such saliency.
    """
    maps = saliency_maps(trained.module, sample.images, sample.targets)
    sharpness = {name: entropy(saliency) for name, saliency in maps.items()}
    pictures = displayable(sample.images[:ROWS], trained.config)
    rows = len(pictures)
    columns, size = 1 + len(maps), (0.5 + 1.65 * (1 + len(maps)), 1.9 * rows + 0.3)
    with figure(path, rows, columns, figsize=size, squeeze=False) as axes:
        for row, picture, *saliencies in zip(axes, pictures, *maps.values(), strict=False):
            row[0].imshow(picture)
            for ax, saliency in zip(row[1:], saliencies, strict=True):
                ax.imshow(_scaled(saliency), cmap="viridis", vmin=0, vmax=1)
            for ax in row:
                ax.set_axis_off()
        axes[0][0].set_title("input")
        for ax, (name, nats) in zip(axes[0][1:], sharpness.items(), strict=True):
            ax.set_title(f"{name.replace('_', ' ')}\nentropy {nats:.2f} nats")
        if "full_rollout" not in maps:
            axes[0][0].figure.supxlabel(ROLLOUT_IS_ONE_STEP, fontsize="small")
    sharpness["uniform"] = math.log(maps["one_step"].shape[1])
    write_text(path.with_suffix(".json"), json.dumps(sharpness, indent=2) + "\n")
    return sharpness


def _scaled(saliency: Tensor) -> np.ndarray:
    """`t` -> `g g`, from 0 to 1."""
    g = round(len(saliency) ** 0.5)
    low, high = saliency.aminmax()
    return ((saliency - low) / (high - low).clamp(min=1e-12)).reshape(g, g).numpy()
