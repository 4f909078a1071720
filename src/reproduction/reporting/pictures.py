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
from reproduction.reporting.trained import Sample, TrainedRun
from tokenmixup import TokenMixup, attach, blocks_of
from tokenmixup.adapters import adapter_of
from tokenmixup.horizontal import HorizontalMix

PAIRS = 3
LONGEST_LABEL = 13  # characters of a class name
ROWS = 4  # images with saliency maps
GRADIENTS_AT_ONCE = 16  # images per backward pass
NO_ROLLOUT = "no full rollout, since no later block attends to all tokens"


def draw_pairs(path: Path, trained: TrainedRun, sample: Sample) -> None:
    """Draws pairs of `sample`, with the saliency that decides; ValueError if none are mixed.

    The images are mixed as in training, without dropout.
    """
    devices = [sample.images.device] if sample.images.is_cuda else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(trained.config.seed)
        mix = trained.module.mixed_pairs(sample.images, sample.targets)
    htm = trained.module.htm
    assert mix is not None and htm is not None
    mix = tree_map_only(Tensor, Tensor.cpu, mix)
    classes = sample.classes.tolist()
    receivers = chosen_pairs(mix, classes)
    if not receivers:
        where = f"of {len(sample.images)} images at block {htm.layers[0]}"
        raise ValueError(f"the trained model mixes none {where}")
    pictures = displayable(sample.images, trained.config)
    names = [f'"{in_one_line(trained.data.classes[x], LONGEST_LABEL)}"' for x in classes]
    size = (10.5, 2.5 * len(receivers))
    with figure(path, len(receivers), 5, figsize=size, squeeze=False) as axes:
        for row, receiver in zip(axes, receivers, strict=True):
            _draw_pair(row, mix, receiver, pictures, names)


def chosen_pairs(mix: HorizontalMix, classes: list[int]) -> list[int]:
    """Returns the receivers of the pairs to show.

    Each two classes have one, different ones first, then those with the most even shares.
    """
    share = mix.mask.float().mean(dim=1)
    receivers = dict[frozenset[int], int]()  # for each two classes
    for i in (share - 0.5).abs().argsort(stable=True).tolist():
        if share[i] > 0:
            donor = int(mix.donor[i])
            receivers.setdefault(frozenset((classes[i], classes[donor])), i)
    different_first = sorted(receivers, key=len, reverse=True)
    return [receivers[pair] for pair in different_first[:PAIRS]]


def _draw_pair(
    row: np.ndarray, mix: HorizontalMix, receiver: int, pictures: np.ndarray, names: list[str]
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
        f"receiver\n{names[receiver]}",
        "its saliency",
        f"donor\n{names[donor]}",
        "its saliency",
        f"mixed: {tokens.sum()} of {tokens.size} tokens\n{label}",
    )
    places = np.arange(-1, size + 1)
    inside = np.pad(replaced, 1).astype(float)
    for ax, title in zip(row, titles, strict=True):
        ax.set_title(title, fontsize=11, parse_math=False)
        ax.set_axis_off()
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


def draw_saliency_maps(path: Path, trained: TrainedRun, sample: Sample) -> None:
    """Draws the maps of the first images, each scaled from its minimum to its maximum.

    Above is the mean entropy over the sample. Raises ValueError as in `saliency_maps`.
    """
    maps = saliency_maps(trained.module, sample.images, sample.targets)
    pictures = displayable(sample.images[:ROWS], trained.config)
    rows, columns = len(pictures), 1 + len(maps)
    size = (0.5 + 1.65 * columns, 1.9 * rows + 0.3)
    with figure(path, rows, columns, figsize=size, squeeze=False) as axes:
        for ax, picture in zip(axes[:, 0], pictures, strict=True):
            ax.imshow(picture)
        axes[0, 0].set_title("input")
        for column, (name, saliency) in zip(axes[:, 1:].T, maps.items(), strict=True):
            for ax, tokens in zip(column, saliency[:ROWS], strict=True):
                ax.imshow(_grid(tokens), cmap="viridis")
            title = f"{name.replace('_', ' ')}\nentropy {entropy(saliency):.2f} nats"
            column[0].set_title(title)
        for ax in axes.flat:
            ax.set_axis_off()
        if "full_rollout" not in maps:
            axes[0, 0].figure.supxlabel(NO_ROLLOUT, fontsize="small")


def saliency_maps(module: TokenMixup, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Returns the saliencies `b t` of the tokens that enter the HTM block, by detector.

    `images` is `b 3 h w`, `targets` `b c`. `full_rollout` covers all blocks to the last; it is left
    out if the HTM block is the last one, where it equals `one_step`, and without attention over all
    tokens. Raises ValueError if the model does not support one of these detectors.
    """
    model = module.model.eval()
    assert module.htm is not None
    layer = module.htm.layers[0]
    later = len(blocks_of(model)) - 1 - layer
    detectors: dict[str, dict[str, Any]] = {"gradient": {"detector": "gradient"}}
    if later > 0 and adapter_of(model).attends_to_all:
        detectors["full_rollout"] = {"rollout_steps": later}
    detectors["one_step"] = {}
    maps = {}
    for name, settings in detectors.items():
        mixing = attach(model, targets.shape[1], htm={"layer": layer, **settings})
        parts = []
        chunks = (images.split(GRADIENTS_AT_ONCE), targets.split(GRADIENTS_AT_ONCE))
        for some_images, some_targets in zip(*chunks, strict=True):
            mix = mixing.mixed_pairs(some_images, some_targets)
            assert mix is not None
            parts.append(mix.saliency.cpu())
        maps[name] = torch.cat(parts)
    return maps


def entropy(saliency: Tensor) -> float:
    """Returns the mean entropy in nats of saliencies `b t`, each normalised to sum 1."""
    share = saliency / saliency.sum(dim=1, keepdim=True)
    return float(torch.special.entr(share).sum(dim=1).mean())
