"""Pictures of a trained run: mixed pairs, and saliency (Figure 3).

Letters: b batch, c classes, t spatial tokens, g tokens along a side, h w image.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from reproduction.config import Config
from reproduction.errors import in_one_line
from reproduction.reporting.drawing import ORANGE, figure
from reproduction.reporting.trained import Sample, TrainedRun, with_htm
from tokenmixup import HTM, TokenMixup, blocks_of
from tokenmixup.horizontal import HorizontalMix

LONGEST_LABEL = 13  # characters of a class name
ROWS = 4  # images with saliency maps
MOST_IMAGES = 16  # of which saliency is taken: the gradients of one backward pass


def draw_pairs(path: Path, trained: TrainedRun, sample: Sample) -> str:
    """Draws pairs of `sample`, with the saliency that decides, and returns what they are.

    The images are mixed as in training, without dropout. ValueError if none are mixed.
    """
    devices = [sample.images.device] if sample.images.is_cuda else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(trained.config.seed)
        mix = trained.module.mixed_pairs(sample.images, sample.targets)
    htm = trained.module.htm
    assert mix is not None and htm is not None
    mix = tree_map_only(Tensor, Tensor.cpu, mix)
    receivers = chosen_pairs(mix)
    where = f"{len(sample.images)} training images without augmentation, at block {htm.layers[0]}"
    if not receivers:
        raise ValueError(f"the trained model mixes none of {where}")
    pictures = displayable(sample.images, trained.config)
    classes = sample.classes.tolist()
    names = [f'"{in_one_line(trained.data.classes[x], LONGEST_LABEL)}"' for x in classes]
    size = (10.5, 2.7 * len(receivers))
    with figure(path, len(receivers), 5, figsize=size, squeeze=False) as axes:
        for row, (title, receiver) in zip(axes, receivers.items(), strict=True):
            _draw_pair(row, title, mix, receiver, pictures, names)
    mixed = int(mix.mask.any(dim=1).sum())
    return (
        f"Pairs of the trained model, which mixes {mixed} of {where}. The median of the mixed ones "
        "by the share of replaced tokens is typical, the other has the most. A token is taken "
        "where the donor is more salient by more than rho; both maps share a scale. Patches from "
        "the donor are outlined; they stand for tokens, which mix inside the network."
    )


def chosen_pairs(mix: HorizontalMix) -> dict[str, int]:
    """Returns the receivers to show: the median of the mixed ones, and the most mixed one."""
    share = mix.mask.float().mean(dim=1)
    order = share.argsort(stable=True)
    mixed = order[share[order] > 0].tolist()
    if not mixed:
        return {}
    chosen = {"median of mixed": mixed[(len(mixed) - 1) // 2]}
    if len(mixed) > 1:
        chosen["most mixed"] = mixed[-1]
    return chosen


def _draw_pair(
    row: np.ndarray,
    about: str,
    mix: HorizontalMix,
    receiver: int,
    pictures: np.ndarray,
    names: list[str],
) -> None:
    """Draws receiver and donor, each beside its saliency on one scale, and their mixture."""
    donor = int(mix.donor[receiver])
    keep = float(mix.keep_ratio[receiver])
    most = float(mix.saliency[[receiver, donor]].max())
    tokens = _grid(mix.mask[receiver])
    size = pictures.shape[1]
    replaced = _over_image(tokens, size)
    mixture = np.where(replaced[..., None], pictures[donor], pictures[receiver])

    row[0].imshow(pictures[receiver])
    row[2].imshow(pictures[donor])
    row[4].imshow(mixture)
    for ax, image in ((row[1], receiver), (row[3], donor)):
        saliency = _over_image(_grid(mix.saliency[image]), size)
        ax.imshow(saliency, vmin=0, vmax=most, cmap="viridis")
    label = f"{keep:.0%} {names[receiver]}, {1 - keep:.0%} {names[donor]}"
    titles = (
        f"{about}\nreceiver {names[receiver]}",
        "its saliency",
        f"donor\n{names[donor]}",
        "its saliency",
        f"mixed: {tokens.sum()} of {tokens.size} tokens\n{label}",
    )
    for ax, title in zip(row, titles, strict=True):
        ax.set_title(title, fontsize=11, parse_math=False)
        ax.set_axis_off()
        _outline(ax, replaced)


def _outline(ax: Any, pixels: np.ndarray) -> None:
    """Draws a line around these pixels of an image, `h w` bool."""
    places = np.arange(-1, len(pixels) + 1)
    inside = np.pad(pixels, 1).astype(float)
    ax.contour(places, places, inside, levels=[0.5], colors=[ORANGE], linewidths=1.5)


def displayable(images: Tensor, config: Config) -> np.ndarray:
    """Normalised `b 3 h w` -> `b h w 3` in 0..1."""
    mean = torch.tensor(config.dataset.mean)[:, None, None]
    std = torch.tensor(config.dataset.std)[:, None, None]
    return (images.cpu() * std + mean).clamp(0, 1).permute(0, 2, 3, 1).numpy()


def _grid(tokens: Tensor) -> np.ndarray:
    """`(g g)` -> `g g`."""
    g = round(len(tokens) ** 0.5)
    return tokens.reshape(g, g).numpy()


def _over_image(grid: np.ndarray, size: int) -> np.ndarray:
    """`g g` -> `h w`, each pixel as its token."""
    token = np.arange(size) * len(grid) // size
    return grid[token[:, None], token]


def draw_saliency_maps(path: Path, trained: TrainedRun, sample: Sample) -> str:
    """Draws the maps of the first images, each scaled from its minimum to its maximum.

    Above is the mean entropy over a few more. Returns what is drawn. Raises ValueError as in
    `saliency_maps`.
    """
    images = sample.images[:MOST_IMAGES]
    maps = saliency_maps(trained.module, images, sample.targets[:MOST_IMAGES])
    pictures = displayable(images[:ROWS], trained.config)
    size = (0.5 + 1.65 * (1 + len(maps)), 1.9 * len(pictures) + 0.3)
    with figure(path, len(pictures), 1 + len(maps), figsize=size, squeeze=False) as axes:
        for row, picture in enumerate(pictures):
            axes[row, 0].imshow(picture)
            for ax, saliency in zip(axes[row, 1:], maps.values(), strict=True):
                ax.imshow(_grid(saliency[row]), cmap="viridis")
        for ax, (name, saliency) in zip(axes[0, 1:], maps.items(), strict=True):
            ax.set_title(f"{name.replace('_', ' ')}\nentropy {entropy(saliency):.2f} nats")
        for ax in axes.flat:
            ax.set_axis_off()
    attention = "by attention (one step, which HTM uses)"
    if "full_rollout" in maps:
        attention = "by attention (full rollout, and one step, which HTM uses)"
    return (
        f"Saliency of the tokens that enter HTM's first block, by gradient and {attention}, on "
        "training images without augmentation. Each map is scaled from its minimum to its maximum; "
        f"entropies are means over {len(images)} images, lower is sharper."
    )


def saliency_maps(module: TokenMixup, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Returns the saliencies `b t` of the tokens that enter the HTM block, by detector.

    `images` is `b 3 h w`, `targets` `b c`. `full_rollout` covers all blocks to the last; it is left
    out if the HTM block is the last one, where it equals `one_step`, and without attention over all
    tokens. Raises ValueError if the model does not support one of these detectors.
    """
    module.model.eval()
    assert module.htm is not None
    layer = module.htm.layers[0]
    later = len(blocks_of(module.model, module.adapter)) - 1 - layer
    detectors = {"gradient": HTM(layer=layer, detector="gradient")}
    if later > 0 and module.adapter.attends_to_all:
        detectors["full_rollout"] = HTM(layer=layer, rollout_steps=later)
    detectors["one_step"] = HTM(layer=layer)
    maps = {}
    for name, htm in detectors.items():
        mix = with_htm(module, htm).mixed_pairs(images, targets)
        assert mix is not None
        maps[name] = mix.saliency.cpu()
    return maps


def entropy(saliency: Tensor) -> float:
    """Returns the mean entropy in nats of saliencies `b t`, each normalised to sum 1."""
    share = saliency / saliency.sum(dim=1, keepdim=True)
    return float(torch.special.entr(share).sum(dim=1).mean())
