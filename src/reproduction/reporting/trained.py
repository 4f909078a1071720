"""A run after training: its module and its training images, to look into them.

Letters: b batch, c classes, h w image.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from timm.data.mixup import mixup_target
from torch import Tensor

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
from reproduction.models.weights import load_state, read_newest
from tokenmixup import HTM, TokenMixup, attach

BATCH = 64  # images, if the batches of the run are not smaller
ON_A_CPU = 16  # images of more than 64 pixels


class TrainedRun(NamedTuple):
    """The module of a run after training, in evaluation mode on its device."""

    config: Config
    module: TokenMixup
    data: Data
    device: torch.device

    def order(self) -> list[int]:
        """Returns the indices of its training images, shuffled by its seed."""
        rng = np.random.default_rng(self.config.seed)
        return rng.permutation(len(self.data.train)).tolist()

    def loaded(self, images: TrainingImages, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Returns `b 3 h w` (uint8) and `b` on its device, as in the first epoch."""
        batch = collated([images[(0, index)] for index in indices])
        return batch.images.to(self.device), batch.classes.to(self.device)


class Sample(NamedTuple):
    """Training images without augmentation."""

    images: Tensor  # b 3 h w, normalised
    classes: Tensor  # b
    targets: Tensor  # b c, smoothed as in the recipe


def load_trained(config: Config, folder: RunFolder) -> TrainedRun:
    """Loads the newest checkpoint of a run, without manifold mixup, for its device.

    Raises UserError if the checkpoints or the data cannot be read.
    """
    data = opened(config.dataset)
    stack = dataclasses.replace(config.augmentation, manifold_mixup=None)
    module = build_module(without_weights(config.model), stack, len(data.classes))
    path, state = read_newest(folder.checkpoints() or [folder.last_path])
    load_state(f"checkpoint={path}", state["module"], module)
    module.model.eval()
    device = torch.device("cpu")
    if config.device != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda")
    return TrainedRun(config, module.to(device), data, device)


def with_htm(module: TokenMixup, htm: HTM) -> TokenMixup:
    """Returns a module of the same model with another HTM and nothing else, to see what it sees."""
    return attach(module.model, module.num_classes, htm=htm, adapter=module.adapter)


def training_batches(trained: TrainedRun, size: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields augmented images and classes in an order that depends on the seed of the run."""
    images = build_training_images(trained.config, trained.data.train)
    order = trained.order()
    size = min(size, len(order))
    for batch in range(min(count, len(order) // size)):
        start = batch * size
        yield trained.loaded(images, order[start : start + size])


def some_images(trained: TrainedRun) -> Sample:
    """Draws training images by the seed of the run."""
    config, data = trained.config, trained.data
    count = min(BATCH, config.recipe.batch_size)
    if trained.device.type == "cpu" and config.model.image_size > 64:
        count = min(ON_A_CPU, count)
    images = TrainingImages(data.train, build_evaluation_transform(config), config.seed)
    pixels, classes = trained.loaded(images, trained.order()[:count])
    normalize = build_normalize(config.dataset.mean, config.dataset.std, trained.device)
    targets = mixup_target(classes, len(data.classes), 1.0, config.recipe.label_smoothing)
    return Sample(normalize(pixels), classes, targets)
