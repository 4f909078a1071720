"""Pictures of a trained run: mixed pairs, and saliency (Figure 3).

Letters: b batch, c classes, t spatial tokens, g tokens along a side, h w image.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from timm.data.mixup import mixup_target
from torch import Tensor
from torch.utils._pytree import tree_map_only

from reproduction.config import Config
from reproduction.data.halves import Data
from reproduction.data.inputs import build_normalize
from reproduction.data.loaders import (
    TrainingImages,
    build_evaluation_transform,
    build_training_images,
)
from reproduction.data.sources import opened
from reproduction.data.workers import collated
from reproduction.folder import RunFolder
from reproduction.models.build import build_module, without_weights
from reproduction.models.weights import module_state, read_newest
from reproduction.reporting.figures import ORANGE, figure, shortened
from reproduction.system import UserError
from tokenmixup import TokenMixup, attach, blocks_of
from tokenmixup.adapters import adapter_of
from tokenmixup.output import LayerMix

BATCH = 64  # images, if the batches of the run are not smaller
ON_A_CPU = 16  # of more than 64 pixels
PAIRS = 3
LONGEST_LABEL = 13  # characters of a class name
ROWS = 4  # images with saliency maps
GRADIENTS_AT_ONCE = 16  # images per backward pass
NO_ROLLOUT = "no full rollout, since no later block attends to all tokens"


class TrainedRun(NamedTuple):
    """The module of a run after training, in evaluation mode on its device."""

    config: Config
    module: TokenMixup
    source: Data
    device: torch.device


class Sample(NamedTuple):
    """Training images without augmentation."""

    images: Tensor  # b 3 h w, normalised
    classes: Tensor  # b
    targets: Tensor  # b c, smoothed as in the recipe


def load_trained(config: Config, folder: RunFolder) -> TrainedRun:
    """Loads the newest checkpoint of a run with HTM, without manifold mixup, for its device.

    Raises UserError without HTM, or if the checkpoints or the data cannot be read.
    """
    if config.augmentation.htm is None:
        raise UserError(f"run={folder.path}: was trained without htm")
    source = opened(config.dataset)
    stack = dataclasses.replace(config.augmentation, manifold_mixup=None)
    module = build_module(without_weights(config.model), stack, len(source.classes))
    path, state = read_newest(folder.checkpoints() or [folder.last_path])
    module.load_state_dict(module_state(f"checkpoint={path}", state, module))
    module.model.eval()
    place = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    return TrainedRun(config, module.to(place), source, place)


def training_batches(trained: TrainedRun, size: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields augmented images and classes in an order that depends on the seed of the run."""
    images = build_training_images(trained.config, trained.source.train)
    number = len(trained.source.train)
    order = np.random.default_rng(trained.config.seed).permutation(number).tolist()
    size = min(size, number)
    for start in range(0, min(count, number // size) * size, size):
        pixels, classes, _ = collated([images[(0, i)] for i in order[start : start + size]])
        yield pixels.to(trained.device), classes.to(trained.device)


def some_images(trained: TrainedRun) -> Sample:
    """Draws training images by the seed of the run."""
    config, source = trained.config, trained.source
    is_slow = trained.device.type == "cpu" and config.model.image_size > 64
    count = min(ON_A_CPU if is_slow else BATCH, config.recipe.batch_size)
    images = TrainingImages(source.train, build_evaluation_transform(config), config.seed)
    order = np.random.default_rng(config.seed).permutation(len(source.train)).tolist()
    pixels, classes, _ = collated([images[(0, index)] for index in order[:count]])
    normalized = build_normalize(config.dataset.mean, config.dataset.std, "cpu")(pixels)
    targets = mixup_target(classes, len(source.classes), 1.0, config.recipe.label_smoothing)
    return Sample(*(part.to(trained.device) for part in (normalized, classes, targets)))


def displayable(images: Tensor, config: Config) -> np.ndarray:
    """Normalised `b 3 h w` -> `b h w 3` in 0..1."""
    mean, std = (torch.tensor(x)[:, None, None] for x in (config.dataset.mean, config.dataset.std))
    return (images.cpu() * std + mean).clamp(0, 1).permute(0, 2, 3, 1).numpy()


def draw_pairs(path: Path, trained: TrainedRun, sample: Sample) -> None:
    """Draws pairs of `sample`, with the saliency that decides; ValueError if none are mixed.

    Each two classes have one, different ones first, then those with the most even shares. The
    images are mixed as in training, without dropout.
    """
    devices = [sample.images.device] if sample.images.is_cuda else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(trained.config.seed)
        mix = trained.module.mixed_pairs(sample.images, sample.targets)
    htm = trained.module.htm
    assert mix is not None and htm is not None
    mix = tree_map_only(Tensor, Tensor.cpu, mix)
    classes, share = sample.classes.tolist(), mix.mask.float().mean(dim=1)
    chosen = dict[frozenset[int], int]()  # a receiver for each two classes
    for i in (share - 0.5).abs().argsort(stable=True).tolist():
        if share[i] > 0:
            chosen.setdefault(frozenset((classes[i], classes[int(mix.donor[i])])), i)
    if not chosen:
        number, block = len(sample.images), htm.layers[0]
        raise ValueError(f"the trained model mixes none of {number} images at block {block}")
    shown = [chosen[pair] for pair in sorted(chosen, key=len, reverse=True)[:PAIRS]]
    pictures = displayable(sample.images, trained.config)
    names = [f'"{shortened(trained.source.classes[x], LONGEST_LABEL)}"' for x in classes]
    size = (10.5, 2.5 * len(shown))
    with figure(path, len(shown), 5, figsize=size, squeeze=False) as axes:
        for row, i in zip(axes, shown, strict=True):
            _draw_pair(row, mix, i, pictures, names)


def _draw_pair(
    row: np.ndarray, mix: LayerMix, i: int, pictures: np.ndarray, names: list[str]
) -> None:
    """Draws receiver and donor, each beside its saliency on one scale, and their mixture."""
    j, keep, grid = int(mix.donor[i]), float(mix.keep_ratio[i]), _grid(mix.mask[i])
    size = pictures.shape[1]
    replaced = _over_image(grid, size)
    scale: Any = {"vmin": 0, "vmax": float(mix.saliency[[i, j]].max()), "cmap": "viridis"}
    own, donors = (_over_image(_grid(mix.saliency[k]), size) for k in (i, j))
    mixture = np.where(replaced[..., None], pictures[j], pictures[i])
    label = f"{keep:.0%} {names[i]}, {1 - keep:.0%} {names[j]}"
    for ax, picture, title in (
        (row[0], pictures[i], f"receiver\n{names[i]}"),
        (row[1], own, "its saliency"),
        (row[2], pictures[j], f"donor\n{names[j]}"),
        (row[3], donors, "its saliency"),
        (row[4], mixture, f"mixed: {grid.sum()} of {grid.size} tokens\n{label}"),
    ):
        ax.imshow(picture, **(scale if picture.ndim == 2 else {}))
        ax.set_title(title, fontsize=11, parse_math=False)
        ax.set_axis_off()
    places, inside = np.arange(-1, size + 1), np.pad(replaced, 1).astype(float)
    for ax in row:
        ax.contour(places, places, inside, levels=[0.5], colors=[ORANGE], linewidths=1.5)


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
        for row, picture, *saliencies in zip(axes, pictures, *maps.values(), strict=False):
            row[0].imshow(picture)
            for ax, saliency in zip(row[1:], saliencies, strict=True):
                ax.imshow(_grid(saliency), cmap="viridis")
            for ax in row:
                ax.set_axis_off()
        axes[0][0].set_title("input")
        for ax, (name, saliency) in zip(axes[0][1:], maps.items(), strict=True):
            ax.set_title(f"{name.replace('_', ' ')}\nentropy {entropy(saliency):.2f} nats")
        if "full_rollout" not in maps:
            axes[0][0].figure.supxlabel(NO_ROLLOUT, fontsize="small")


def saliency_maps(module: Any, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Returns the saliencies `b t` of the tokens that enter the HTM block, by detector.

    `images` is `b 3 h w`, `targets` `b c`. `full_rollout` covers all blocks to the last; it is left
    out if the HTM block is the last one, where it equals `one_step`, and without attention over all
    tokens. Raises ValueError if the model does not support one of these detectors.
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
