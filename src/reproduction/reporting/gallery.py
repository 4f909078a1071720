"""Mixed pairs of a trained run: receiver, donor, what was replaced, and the labels.

Letters: b batch, g tokens along a side, h w image.
"""

from pathlib import Path

import numpy as np
import torch
from matplotlib.collections import LineCollection
from torch import Tensor

from reproduction.reporting.figures import ORANGE, figure
from reproduction.reporting.trained import Sample, Trained, displayable
from tokenmixup import HorizontalMix

PAIRS = 4
LONGEST = 16  # characters of a class that are shown
SHORT = 10  # of two classes that share a line


def draw_pairs(path: Path, trained: Trained, sample: Sample) -> None:
    """Draws the pairs of `sample` that share the image most evenly; ValueError if none are mixed.

    The images are mixed as in training, without dropout.
    """
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(trained.config.seed)
        found = trained.module.mixed_pairs(sample.images, sample.targets)
    assert found is not None
    mix = HorizontalMix(*(part.cpu() for part in found))
    chosen = _most_even(mix)
    if not chosen:
        raise ValueError(f"the trained model mixes none of {len(sample.images)} images")
    pictures = displayable(sample.images, trained.config)
    names = [_named(trained.source.classes[target]) for target in sample.classes]
    with figure(path, len(chosen), 3, figsize=(7, 2.75 * len(chosen)), squeeze=False) as axes:
        for row, i in zip(axes, chosen, strict=True):
            _draw_pair(row, mix, i, pictures, names)


def _draw_pair(
    row: np.ndarray, mix: HorizontalMix, i: int, pictures: np.ndarray, names: list[str]
) -> None:
    """Receiver `i`, its donor, and what becomes of both."""
    j, keep, grid = int(mix.donor[i]), float(mix.keep_ratio[i]), _grid(mix.mask[i])
    replaced = _over_image(grid, pictures.shape[1])
    mixed = np.where(replaced[..., None], pictures[j], pictures[i])
    apart = "\n" if len(names[i] + names[j]) > SHORT else " "
    label = f"label: {keep:.0%} {names[i]}{apart}+ {1 - keep:.0%} {names[j]}"
    for ax, picture, title in (
        (row[0], pictures[i], f"receiver: {names[i]}"),
        (row[1], pictures[j], f"donor: {names[j]}"),
        (row[2], mixed, f"{grid.sum()} of {grid.size} tokens replaced\n{label}"),
    ):
        ax.imshow(picture)
        ax.set_title(title, parse_math=False)
        ax.set_axis_off()
    row[2].add_collection(_frames(grid, len(mixed)), autolim=False)


def _most_even(mix: HorizontalMix) -> list[int]:
    """Receivers whose replaced tokens come closest to half of all."""
    share = mix.mask.float().mean(dim=1)
    order = (share - 0.5).abs().argsort(stable=True).tolist()
    return [i for i in order if share[i] > 0][:PAIRS]


def _named(name: str) -> str:
    return f'"{name}"' if len(name) <= LONGEST else f'"{name[: LONGEST - 3]}..."'


def _grid(mask: Tensor) -> np.ndarray:
    """`(g g)` -> `g g`."""
    g = round(len(mask) ** 0.5)
    return mask.reshape(g, g).numpy()


def _over_image(grid: np.ndarray, size: int) -> np.ndarray:
    """`g g` -> `h w`, each pixel as its token."""
    token = np.arange(size) * len(grid) // size
    return grid[token[:, None], token]


def _frames(grid: np.ndarray, size: int) -> LineCollection:
    """The borders between tokens that are replaced and those that are not."""
    padded, cell = np.pad(grid, 1), size / len(grid)
    top = np.argwhere(padded[1:, 1:-1] != padded[:-1, 1:-1])
    left = np.argwhere(padded[1:-1, 1:] != padded[1:-1, :-1])
    lines = [((x, y), (x + 1, y)) for y, x in top] + [((x, y), (x, y + 1)) for y, x in left]
    return LineCollection(
        [np.array(line) * cell - 0.5 for line in lines],
        colors=ORANGE,
        capstyle="round",
        clip_on=False,
    )
