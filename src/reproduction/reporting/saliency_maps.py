"""Figure 3: saliency of a trained run's tokens by gradient, full rollout and one step.

Letters: b batch, t spatial tokens, h w image.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduction.config import Config
from reproduction.data.sources import load_source
from reproduction.errors import UserError
from reproduction.models.build import build_module, without_start
from reproduction.models.weights import read_file
from reproduction.reporting.figures import figure
from reproduction.reporting.gallery import displayable, some_images
from tokenmixup import gradient_saliency
from tokenmixup.detectors import BlockInput, by_rollout
from tokenmixup.saliency import input_gradient
from tokenmixup.structure import declared_prefix, has_class_token

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
    seen: list[tuple[Tensor, dict[str, Any]]] = []

    def note(block: nn.Module, args: tuple[Tensor], given: dict[str, Any]) -> None:
        seen.append((args[0], given))

    handle = model.blocks[layer].register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        model(images)
    handle.remove()
    (tokens, given), prefix = seen[0], declared_prefix(model)
    with_class_token = prefix > 0 and has_class_token(model)
    entry = BlockInput(model.blocks, layer, tokens, given, prefix, with_class_token)
    pixels = input_gradient(model, images, targets)
    return SaliencyMaps(
        gradient_saliency(pixels, tokens.shape[1] - prefix),
        by_rollout(len(model.blocks) - 1 - layer, entry),
        entry.own_saliency(),
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
    source = load_source(config.dataset.name, config.dataset.root, config.dataset.limit)
    stack = replace(config.augmentation, manifold_mixup=None)
    module = build_module(without_start(config.model), stack, len(source.classes))
    module.load_state_dict(read_file(f"checkpoint={last_checkpoint}", last_checkpoint)["module"])
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
