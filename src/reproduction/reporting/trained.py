"""The model of a trained run, and sample images.

Letters: b batch, c classes, h w image.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from timm.data.mixup import mixup_target
from torch import Tensor
from torch.utils.data import default_collate

from reproduction.config import Config
from reproduction.data.inputs import build_normalize
from reproduction.data.loaders import (
    TrainingImages,
    build_evaluation_transform,
    build_training_images,
)
from reproduction.data.sources import Data, opened
from reproduction.models.build import build_module, without_weights
from reproduction.models.weights import module_state, read_newest
from reproduction.runs import RunFolder
from reproduction.system import UserError
from tokenmixup import TokenMixup

BATCH = 64  # images per batch, if the batches of the run are not smaller
SMALL_IMAGE, ON_A_CPU = 64, 18  # pixels; images of more pixels per batch


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


def load_trained(config: Config, folder: RunFolder, device: str = "cpu") -> TrainedRun:
    """Loads the newest checkpoint of a run with HTM, without manifold mixup.

    `device` is as in the configuration: `auto` is a GPU if there is one. Raises UserError without
    HTM, or if the checkpoints or the data cannot be read.
    """
    if config.augmentation.htm is None:
        raise UserError(f"run={folder.path}: was trained without htm")
    source = opened(config.dataset)
    stack = dataclasses.replace(config.augmentation, manifold_mixup=None)
    module = build_module(without_weights(config.model), stack, len(source.classes))
    path, state = read_newest(folder.checkpoints() or [folder.last_path])
    module.load_state_dict(module_state(f"checkpoint={path}", state, module))
    module.model.eval()
    place = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    return TrainedRun(config, module.to(place), source, place)


def training_batches(trained: TrainedRun, size: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields augmented images and classes in an order that depends on the seed of the run."""
    images = build_training_images(trained.config, trained.source.train)
    number = len(trained.source.train)
    order = np.random.default_rng(trained.config.seed).permutation(number).tolist()
    size = min(size, number)
    for start in range(0, min(count, number // size) * size, size):
        pixels, classes = default_collate([images[(0, i)] for i in order[start : start + size]])
        yield pixels.to(trained.device), classes.to(trained.device)


def batch_size(trained: TrainedRun) -> int:
    """Returns the number of images per batch for pictures, fewer of large images on a CPU."""
    is_slow = trained.device.type == "cpu" and trained.config.model.image_size > SMALL_IMAGE
    return min(ON_A_CPU if is_slow else BATCH, trained.config.recipe.batch_size)


def some_images(trained: TrainedRun, count: int) -> Sample:
    """Draws up to `count` training images by the seed of the run; fewer are a prefix of more."""
    config, source = trained.config, trained.source
    images = TrainingImages(source.train, build_evaluation_transform(config), config.seed)
    order = np.random.default_rng(config.seed).permutation(len(source.train)).tolist()
    pixels, classes = default_collate([images[(0, index)] for index in order[:count]])
    normalized = build_normalize(config.dataset.mean, config.dataset.std, "cpu")(pixels)
    targets = mixup_target(classes, len(source.classes), 1.0, config.recipe.label_smoothing)
    return Sample(*(part.to(trained.device) for part in (normalized, classes, targets)))


def displayable(images: Tensor, config: Config) -> np.ndarray:
    """Normalised `b 3 h w` -> `b h w 3` in 0..1."""
    mean, std = (torch.tensor(x)[:, None, None] for x in (config.dataset.mean, config.dataset.std))
    return (images.cpu() * std + mean).clamp(0, 1).permute(0, 2, 3, 1).numpy()
