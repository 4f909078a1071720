"""Mixed pairs of a trained run: receiver, donor, what was replaced, and the labels.

Letters: b batch, g tokens along a side, h w image.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate

from reproduction.config import Config
from reproduction.data.build import build_evaluation_transform
from reproduction.data.sources import Source
from reproduction.reporting.figures import ORANGE, figure
from reproduction.reporting.trained import load_trained
from tokenmixup import HorizontalMix

CANDIDATES = 64  # training images that the pairs are chosen among
PAIRS = 4


def draw_pairs(path: Path, config: Config, last_checkpoint: Path) -> bool:
    """Draws the pairs that share the image most evenly; False if the run mixes none."""
    if config.augmentation.htm is None or not last_checkpoint.exists():
        return False
    module, source = load_trained(config, last_checkpoint)
    images, targets = some_images(config, source)
    with torch.no_grad():  # mixes as in training, without dropout
        mix = module.mixed_pairs(images, F.one_hot(targets, len(source.classes)).float())
    assert mix is not None
    chosen = _most_even(mix)
    if not chosen:
        return False
    pictures = displayable(images, config)
    with figure(path, len(chosen), 3, figsize=(7, 2.5 * len(chosen)), squeeze=False) as axes:
        for row, i in zip(axes, chosen, strict=True):
            j = int(mix.donor[i])
            replaced = _mask_over_image(mix.mask[i], pictures.shape[-3])
            mixed = np.where(replaced[..., None], pictures[j], pictures[i])
            own, other = source.classes[targets[i]], source.classes[targets[j]]
            keep = float(mix.keep_ratio[i])
            after = f"{own} {keep:.0%} + {other} {1 - keep:.0%}"
            row[0].set_title(f"receiver: {own}")
            row[1].set_title(f"donor: {other}")
            row[2].set_title(f"{int(mix.mask[i].sum())} tokens replaced\n{own} becomes {after}")
            for ax, picture in zip(row, (pictures[i], pictures[j], mixed), strict=True):
                ax.imshow(picture)
                ax.set_axis_off()
            border = np.arange(-1, len(replaced) + 1)  # closes the frames at the image's edge
            row[2].contour(border, border, np.pad(replaced, 1), [0.5], colors=ORANGE, linewidths=1)
    return True


def _most_even(mix: HorizontalMix) -> list[int]:
    """Receivers whose replaced tokens come closest to half of all."""
    share = mix.mask.float().mean(dim=1)
    order = (share - 0.5).abs().argsort(stable=True).tolist()
    return [i for i in order if share[i] > 0][:PAIRS]


def some_images(config: Config, source: Source) -> tuple[Tensor, Tensor]:
    """Training images without augmentation: `b 3 h w` and classes `b`."""
    transform = build_evaluation_transform(config)
    order = np.random.default_rng(config.seed).permutation(len(source.train))[:CANDIDATES]
    items = [source.train[int(index)] for index in order]
    return default_collate([(transform(image), target) for image, target in items])


def displayable(images: Tensor, config: Config) -> np.ndarray:
    """Normalised `b 3 h w` -> `b h w 3` in 0..1."""
    mean, std = (torch.tensor(x)[:, None, None] for x in (config.dataset.mean, config.dataset.std))
    return (images * std + mean).clamp(0, 1).permute(0, 2, 3, 1).numpy()


def _mask_over_image(mask: Tensor, size: int) -> np.ndarray:
    """`(g g)` bool -> `h w` bool."""
    g = round(len(mask) ** 0.5)
    grid = mask.reshape(1, 1, g, g).float()
    return F.interpolate(grid, size=(size, size), mode="nearest")[0, 0].numpy() > 0.5
