"""Pictures of a trained run: mixed pairs, and saliency (Figure 3).

Letters: b batch, c classes, t spatial tokens, g tokens along a side, h w image.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from matplotlib.patheffects import withStroke
from torch import Tensor

from reproduction.reporting.figures import BLUE, NO_ROLLOUT, ORANGE, figure
from reproduction.reporting.trained import Sample, TrainedRun, displayable
from tokenmixup import attach, blocks_of
from tokenmixup.adapters import adapter_of
from tokenmixup.output import LayerMix

PAIRS = 3
LONGEST_LABEL = 13  # characters of a class name
BAR = 0.12  # width of a label, relative to its height
ROWS = 4  # images with saliency maps
GRADIENTS_AT_ONCE = 16  # images per backward pass


def draw_pairs(path: Path, trained: TrainedRun, sample: Sample) -> None:
    """Draws pairs of `sample`, with the saliency that decides; ValueError if none are mixed.

    Pairs of different classes come first, each two classes once, then those with the most even
    shares. The images are mixed as in training, without dropout.
    """
    devices = [sample.images.device] if sample.images.is_cuda else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(trained.config.seed)
        mix = trained.module.mixed_pairs(sample.images, sample.targets)
    htm = trained.module.htm
    assert mix is not None and htm is not None
    mix = mix._replace(donor=mix.donor.cpu(), mask=mix.mask.cpu(), keep_ratio=mix.keep_ratio.cpu())
    chosen = _telling(mix, sample.classes.cpu())
    if not chosen:
        number, block = len(sample.images), htm.layers[0]
        raise ValueError(f"the trained model mixes none of {number} images at block {block}")
    saliency = mix.saliency.cpu()
    pictures = displayable(sample.images, trained.config)
    names = [_quote(trained.source.classes[target]) for target in sample.classes]
    settings: Any = {"squeeze": False, "width_ratios": (1, 1, 1, 1, 1, BAR)}
    with figure(path, len(chosen), 6, figsize=(10.5, 2.3 * len(chosen)), **settings) as axes:
        for row, i in zip(axes, chosen, strict=True):
            _draw_pair(row, mix, i, pictures, names, saliency)


def _draw_pair(
    row: np.ndarray,
    mix: LayerMix,
    i: int,
    pictures: np.ndarray,
    names: list[str],
    saliency: Tensor,
) -> None:
    """Draws receiver and donor, each beside its saliency on one scale, their mixture, its label."""
    j, keep, grid = int(mix.donor[i]), float(mix.keep_ratio[i]), _grid(mix.mask[i])
    size = pictures.shape[1]
    replaced = _over_image(grid, size)[..., None]
    scale: Any = {"vmin": 0, "vmax": float(saliency[[i, j]].max()), "cmap": "viridis"}
    own, donors = (_over_image(_grid(saliency[k]), size) for k in (i, j))
    for ax, picture, title in (
        (row[0], pictures[i], f"receiver\n{names[i]}"),
        (row[1], own, "its saliency"),
        (row[2], pictures[j], f"donor\n{names[j]}"),
        (row[3], donors, "its saliency"),
        (
            row[4],
            np.where(replaced, pictures[j], pictures[i]),
            f"mixed:\n{grid.sum()} of {grid.size} tokens",
        ),
    ):
        ax.imshow(picture, **(scale if picture.ndim == 2 else {}))
        ax.set_title(title, fontsize=11, parse_math=False)
        ax.set_axis_off()
    for ax in row[1:5]:
        ax.add_artist(_frames(grid, size))
    _draw_label(row[5], [(names[i], keep), (names[j], 1 - keep)])


def _draw_label(ax: Any, parts: list[tuple[str, float]]) -> None:
    """Draws the shares of a label as the parts of a bar, the first on top."""
    ax.set(xlim=(0, 1), ylim=(1, 0), box_aspect=1 / BAR)
    ax.set_title("its label", fontsize=11, loc="left")
    ax.set_axis_off()
    top = 0.0
    for (name, share), color in zip(parts, (BLUE, ORANGE), strict=True):
        ax.bar(0.5, share, 1, top, color=color)
        middle = min(max(top + share / 2, 0.1), 0.9)  # beside the bar, with two lines
        ax.text(1.5, middle, f"{share:.0%}\n{name}", va="center", fontsize=11)
        top += share


def _telling(mix: LayerMix, classes: Tensor) -> list[int]:
    """Returns the receivers to show: of two classes first, each two once, then even shares."""
    share, theirs = mix.mask.float().mean(dim=1), classes[mix.donor]
    mixed = [i for i in (share - 0.5).abs().argsort(stable=True).tolist() if share[i] > 0]
    later: dict[int, tuple[bool, bool]] = {}  # of one class, of two that have been there
    shown: set[frozenset[int]] = set()
    for i in mixed:
        pair = frozenset((int(classes[i]), int(theirs[i])))
        later[i] = (len(pair) == 1, pair in shown)
        shown.add(pair)
    return sorted(mixed, key=later.__getitem__)[:PAIRS]


def _quote(name: str) -> str:
    return f'"{name}"' if len(name) <= LONGEST_LABEL else f'"{name[: LONGEST_LABEL - 3]}..."'


def _grid(tokens: Tensor) -> np.ndarray:
    """`(g g)` -> `g g`."""
    g = round(len(tokens) ** 0.5)
    return tokens.reshape(g, g).numpy()


def _over_image(grid: np.ndarray, size: int) -> np.ndarray:
    """`g g` -> `h w`, each pixel as its token."""
    token = np.arange(size) * len(grid) // size
    return grid[token[:, None], token]


def _frames(grid: np.ndarray, size: int) -> PathPatch:
    """Returns the borders between replaced and kept tokens, to be seen on any picture."""
    padded, cell = np.pad(grid, 1), size / len(grid)
    top = np.argwhere(padded[1:, 1:-1] != padded[:-1, 1:-1])
    left = np.argwhere(padded[1:-1, 1:] != padded[1:-1, :-1])
    lines = [((x, y), (x + 1, y)) for y, x in top] + [((x, y), (x, y + 1)) for y, x in left]
    return PathPatch(
        Outline.make_compound_path(*(Outline(np.array(line) * cell - 0.5) for line in lines)),
        edgecolor=ORANGE,
        fill=False,
        linewidth=1.5,
        path_effects=[withStroke(linewidth=3, foreground="black")],
        capstyle="round",
        clip_on=False,
    )


def draw_saliency_maps(path: Path, trained: TrainedRun, sample: Sample) -> dict[str, float]:
    """Draws the maps of the first images, each scaled from its minimum to its maximum.

    Returns the mean entropy of each saliency over the sample and that of a uniform one, in nats.
    Raises ValueError as in `saliency_maps`.
    """
    maps = saliency_maps(trained.module, sample.images, sample.targets)
    sharpness = {name: entropy(saliency) for name, saliency in maps.items()}
    pictures = displayable(sample.images[:ROWS], trained.config)
    rows, columns = len(pictures), 1 + len(maps)
    size = (0.5 + 1.65 * columns, 1.9 * rows + 0.3)
    with figure(path, rows, columns, figsize=size, squeeze=False) as axes:
        for row, picture, *saliencies in zip(axes, pictures, *maps.values(), strict=False):
            row[0].imshow(picture)
            for ax, saliency in zip(row[1:], saliencies, strict=True):
                ax.imshow(_grid(saliency), cmap="viridis")
            for ax in row:
                ax.set_axis_off()
        axes[0][0].set_title("input")
        for ax, (name, nats) in zip(axes[0][1:], sharpness.items(), strict=True):
            ax.set_title(f"{name.replace('_', ' ')}\nentropy {nats:.2f} nats")
        if "full_rollout" not in maps:
            axes[0][0].figure.supxlabel(NO_ROLLOUT, fontsize="small")
    return sharpness | {"uniform": math.log(maps["one_step"].shape[1])}


def saliency_maps(module: Any, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Returns the saliencies `b t` of the tokens that enter the HTM block, by detector.

    `images` is `b 3 h w`, `targets` `b c`. `full_rollout` covers all blocks to the last; it is left
    out if the HTM block is the last one, where it equals `one_step`, and without attention over all
    tokens. Raises ValueError if the model does not support attention rollout, or its tokens form no
    grid.
    """
    model, layer = module.model.eval(), module.htm.layers[0]
    steps = len(blocks_of(model)) - 1 - layer if adapter_of(model).attends_to_all else 0
    detectors: dict[str, dict[str, Any]] = {"gradient": {"detector": "gradient"}}
    if steps > 0:
        detectors["full_rollout"] = {"rollout_steps": steps}
    detectors["one_step"] = {}
    maps = {}
    for name, settings in detectors.items():
        mixing = attach(model, targets.shape[1], htm={"layer": layer, **settings})
        batches = zip(*(x.split(GRADIENTS_AT_ONCE) for x in (images, targets)), strict=True)
        mixes = [mixing.mixed_pairs(*batch) for batch in batches]
        maps[name] = torch.cat([mix.saliency.cpu() for mix in mixes if mix is not None])
    return maps


def entropy(saliency: Tensor) -> float:
    """Returns the mean entropy in nats of saliencies `b t`, each normalised to sum 1."""
    share = saliency / saliency.sum(dim=1, keepdim=True)
    return float(torch.special.entr(share).sum(dim=1).mean())
