"""Loaders whose batches depend on seed and epoch only, not on workers or world size."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, Sampler

from reproduction.config import Config
from reproduction.data.halves import Half
from reproduction.data.images import read, rgb, upright
from reproduction.data.inputs import build_normalize
from reproduction.data.seeding import Purpose, preserved_generators, seed_generators
from reproduction.data.workers import Example, Loader
from reproduction.errors import PlainError, UserError, warn

RATIO = (0.75, 1.3333)  # of a random crop, width / height
IN_A_ROW = 50  # images that cannot be read, as in timm: more end the run
Transform = Callable[[Image.Image], Tensor]


@dataclass(frozen=True)
class TrainingImages(Dataset[Example]):
    """Augmented images. The augmentation depends on (seed, epoch, index) only."""

    half: Half
    transform: Transform
    seed: int

    def __getitem__(self, key: tuple[int, int]) -> Example:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Example]:
        """Loads a batch, so that generators are saved once per batch instead of per image."""
        with preserved_generators():
            return [self._augmented(*key) for key in keys]

    def _augmented(self, epoch: int, index: int) -> Example:
        image, target = self._readable(index, IN_A_ROW)
        seed_generators(Purpose.AUGMENT, self.seed, epoch, index)
        return Example(index, self.transform(image), target)

    def _readable(self, index: int, left: int) -> tuple[Image.Image, int]:
        """The image at an index or, as in timm, the next one that can be read, with its class."""
        try:
            return self.half[index]
        except PlainError as error:
            if left == 0:
                raise
            warn(f"warning: {error}; the next image takes its place")
            return self._readable((index + 1) % len(self.half), left - 1)


@dataclass(frozen=True)
class EvaluationImages(Dataset[Example]):
    """Images for evaluation."""

    half: Half
    transform: Transform

    def __getitem__(self, index: int) -> Example:
        image, target = self.half[index]
        return Example(index, self.transform(image), target)

    def __getitems__(self, indices: list[int]) -> list[Example]:
        return [self[index] for index in indices]


class TrainingBatches(Sampler[list[tuple[int, int]]]):
    """This rank's share of every global batch, as keys (epoch, index).

    Each epoch is a permutation by (seed, epoch). With `drop_last` it is cut into global batches of
    `batch_size` images, and the images that are left over are not of this epoch; fewer images than
    that are one batch. Without it every image appears once: in the fewest batches of at most
    `batch_size`, whose sizes differ by at most one. Each rank takes a contiguous share, so the
    global batches do not depend on the number of ranks.
    """

    def __init__(self, config: Config, num_images: int, rank: int, ranks: int):
        batch_size = config.recipe.batch_size
        self.num_images = num_images
        self.seed = config.seed
        self.rank = rank
        self.ranks = ranks
        if config.recipe.drop_last:
            self.num_batches = max(1, num_images // batch_size)
        else:
            self.num_batches = math.ceil(num_images / batch_size)
        self.epoch_images = min(num_images, self.num_batches * batch_size)
        micro_batches = ranks * config.recipe.grad_accum_steps
        if self.epoch_images // self.num_batches < micro_batches:
            raise UserError(
                f"devices={ranks} recipe.grad_accum_steps={config.recipe.grad_accum_steps}: "
                f"{num_images} training images in batches of {batch_size} leave some without one"
            )
        self.epoch = 0
        self.first = 0

    def start_at(self, epoch: int, first: int) -> None:
        """Makes the next pass yield the batches of `epoch`, starting with batch `first`."""
        self.epoch = epoch
        self.first = first

    def __len__(self) -> int:
        return self.num_batches

    def global_size(self, step: int) -> int:
        """Returns the number of images of the global batch of a step, from 0 over all epochs."""
        size, larger = divmod(self.epoch_images, self.num_batches)
        return size + 1 if step % self.num_batches < larger else size

    def count_images(self, steps: int) -> int:
        """Returns the number of images of the first `steps` global batches, over all epochs."""
        epochs, batches = divmod(steps, self.num_batches)
        return epochs * self.epoch_images + sum(map(self.global_size, range(batches)))

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.num_images)
        of_epoch = order[: self.epoch_images]
        for batch in np.array_split(of_epoch, self.num_batches)[self.first :]:
            share = np.array_split(batch, self.ranks)[self.rank]
            yield [(self.epoch, int(index)) for index in share]


def build_training_images(config: Config, half: Half) -> TrainingImages:
    """Returns the training images with timm's augmentation: `3 s s` uint8."""
    size = config.model.image_size
    settings = config.recipe.transforms
    try:
        transform = create_transform(
            (3, size, size),
            is_training=True,
            scale=(settings.scale[0], settings.scale[1]),
            ratio=(1, 1) if settings.scale == [1, 1] else RATIO,
            interpolation=settings.interpolation,
            hflip=settings.hflip,
            color_jitter=settings.color_jitter,  # ignored by timm if auto-augment is set
            auto_augment=settings.auto_augment,
            mean=tuple(config.dataset.mean),  # fill colour of auto-augment
            normalize=False,
        )
    except (ValueError, AssertionError, NotImplementedError) as error:  # invalid policy
        key = f"recipe.transforms.auto_augment={settings.auto_augment}"
        raise UserError(f"{key}: timm refuses it") from error
    return TrainingImages(half, transform, config.seed)


def preprocessing(config: Config) -> dict[str, Any]:
    """How an image becomes the model's input in evaluation, for timm's `create_transform`."""
    return {
        "image_size": config.model.image_size,
        "crop_pct": config.recipe.transforms.eval_crop_pct,
        "interpolation": "bicubic",
        "mean": config.dataset.mean,
        "std": config.dataset.std,
    }


def build_evaluation_transform(config: Config) -> Transform:
    """Returns PIL image -> `3 s s` uint8; centre crop of `eval_crop_pct` of the shorter side."""
    settings = preprocessing(config)
    size = settings.pop("image_size")
    return create_transform(size, **settings, is_training=False, normalize=False)


def build_evaluation_loader(config: Config, half: Half, rank: int, ranks: int, pin: bool) -> Loader:
    """Returns the loader of every `ranks`-th image from `rank` on: each once, without padding."""
    images = EvaluationImages(half, build_evaluation_transform(config))
    size = max(1, config.recipe.batch_size // ranks)
    batches = BatchSampler(range(rank, len(half), ranks), size, drop_last=False)
    return Loader(images, batches, config.workers, pin)


@dataclass(frozen=True)
class InputTransform:
    """A PIL image of any mode, or a path -> the model's input in evaluation, `3 s s` float32.

    A list of n of them gives `n 3 s s`. Images are seen upright and on white. Raises ValueError for
    a broken file, and for an image of more than 8 bits a channel.
    """

    crop: Transform
    mean: list[float]
    std: list[float]

    def __call__(self, images: Any) -> Tensor:
        if isinstance(images, list | tuple):
            return torch.stack([self(image) for image in images])
        if isinstance(images, str | os.PathLike):
            image = read(os.fspath(images))
        else:
            image = rgb(upright(images))
        normalize = build_normalize(self.mean, self.std, "cpu")
        return normalize(self.crop(image))
