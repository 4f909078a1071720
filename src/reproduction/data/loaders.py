"""Loaders whose batches depend on seed and epoch only, not on workers or world size."""

import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from reproduction.config import Config
from reproduction.data.images import read, rgb, upright
from reproduction.data.inputs import build_normalize
from reproduction.data.seeding import Purpose, preserved_generators, seed_generators
from reproduction.data.sources import Half, cached
from reproduction.system import STOP_SIGNALS, UserError

RATIO = (0.75, 1.3333)  # of a random crop, width / height
Transform = Callable[[Image.Image], Tensor]
Example = tuple[Tensor, int]
Loader = Iterable[list[Tensor]]  # images `b 3 s s` uint8, classes `b`


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
        image, target = self.half[index]
        seed_generators(Purpose.AUGMENT, self.seed, epoch, index)
        return self.transform(image), target


@dataclass(frozen=True)
class EvaluationImages(Dataset[Example]):
    half: Half
    transform: Transform

    def __getitem__(self, index: int) -> Example:
        image, target = self.half[index]
        return self.transform(image), target


class TrainingBatches(Sampler[list[tuple[int, int]]]):
    """This rank's share of every global batch, as keys (epoch, index).

    Each epoch is a permutation by (seed, epoch), split into the fewest global batches of at most
    `batch_size`, with sizes that differ by at most one: every image appears once and there is no
    small last batch. Each rank takes a contiguous share, so the global batches do not depend on the
    number of ranks.
    """

    def __init__(self, num_images: int, batch_size: int, seed: int, rank: int = 0, ranks: int = 1):
        self.num_images, self.seed, self.rank, self.ranks = num_images, seed, rank, ranks
        self.num_batches = math.ceil(num_images / batch_size)
        if num_images // self.num_batches < ranks:
            raise UserError(
                f"devices={ranks}: {num_images} training images in batches of {batch_size} leave "
                "some ranks without an image"
            )
        self.epoch = self.first = 0

    def start_at(self, epoch: int, first: int) -> None:
        """Makes the next pass yield the batches of `epoch`, starting with batch `first`."""
        self.epoch, self.first = epoch, first

    def __len__(self) -> int:
        return self.num_batches

    def global_size(self, batch: int) -> int:
        """Returns the number of images of a global batch."""
        return self.num_images // self.num_batches + (batch < self.num_images % self.num_batches)

    def images(self, steps: int) -> int:
        """Returns the number of images of the first `steps` global batches, over all epochs."""
        epochs, batches = divmod(steps, self.num_batches)
        return epochs * self.num_images + sum(map(self.global_size, range(batches)))

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.num_images)
        for batch in np.array_split(order, self.num_batches)[self.first :]:
            share = np.array_split(batch, self.ranks)[self.rank]
            yield [(self.epoch, int(index)) for index in share]


def build_training_images(config: Config, half: Half) -> TrainingImages:
    """Returns the training images with timm's augmentation: `3 s s` uint8."""
    x, size = config.recipe.transforms, config.model.image_size
    try:
        transform = create_transform(
            (3, size, size),
            is_training=True,
            scale=(x.scale[0], x.scale[1]),
            ratio=(1, 1) if x.scale == [1, 1] else RATIO,
            interpolation=x.interpolation,
            hflip=x.hflip,
            color_jitter=x.color_jitter,  # ignored by timm if auto-augment is set
            auto_augment=x.auto_augment,
            mean=tuple(config.dataset.mean),  # fill colour of auto-augment
            normalize=False,
        )
    except (ValueError, AssertionError, NotImplementedError) as error:  # invalid policy
        line = f"recipe.transforms.auto_augment={x.auto_augment}: timm refuses it"
        raise UserError(line) from error
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
    about = preprocessing(config)
    return create_transform(about.pop("image_size"), **about, is_training=False, normalize=False)


def build_training_loader(
    config: Config, half: Half, batches: TrainingBatches, pin: bool
) -> Loader:
    """Returns the loader of this rank's batches, see `cached`."""
    images = build_training_images(config, cached(half))
    return _loader(images, batches, config.workers, pin)


def build_evaluation_loader(config: Config, half: Half, rank: int, ranks: int, pin: bool) -> Loader:
    """Returns the loader of this rank's share of the images: each exactly once, without padding."""
    images = EvaluationImages(cached(half), build_evaluation_transform(config))
    size = max(1, config.recipe.batch_size // ranks)
    batches = BatchSampler(range(rank, len(half), ranks), size, drop_last=False)
    return _loader(images, batches, config.workers, pin)


class Worker(ForkProcess):
    """A process that loads images, to be told from other children of this process."""


class Workers(ForkContext):
    """Forks workers, which shares images in memory; spawned ranks would default to spawning."""

    Process = Worker


def _loader(images: Dataset[Example], batches: Iterable[list[Any]], workers: int, pin: bool) -> Any:
    if workers:
        Finalize(None, _end_workers, exitpriority=0)  # also at the end of a rank
    return DataLoader(
        images,
        batch_sampler=batches,
        num_workers=workers,
        multiprocessing_context=Workers() if workers else None,
        persistent_workers=workers > 0,
        pin_memory=pin,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),  # worker seeds must not draw from dropout's generator
    )


def _ignore_signals(worker: int) -> None:
    """Keeps a worker running until its parent ends it, if a signal reaches the process group."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _end_workers() -> None:
    """Kills workers that are still referenced, as by the traceback of an error.

    Otherwise multiprocessing sends SIGTERM, which they ignore, and waits forever.
    """
    if workers := [x for x in multiprocessing.active_children() if isinstance(x, Worker)]:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # silences torch's report of killed workers
        for worker in workers:
            worker.kill()


@dataclass(frozen=True)
class InputTransform:
    """A PIL image of any mode, or a path -> the model's input in evaluation, `3 s s` float32.

    A list of n of them gives `n 3 s s`. Images are seen upright and on white. RuntimeError names a
    broken file; ValueError for a PIL image of more than 8 bits a channel.
    """

    crop: Transform
    mean: list[float]
    std: list[float]

    def __call__(self, images: Any) -> Tensor:
        if isinstance(images, list | tuple):
            return torch.stack([self(image) for image in images])
        is_path = isinstance(images, str | os.PathLike)
        image = read(os.fspath(images)) if is_path else rgb(upright(images))
        return build_normalize(self.mean, self.std, "cpu")(self.crop(image))


def build_input_transform(config: Config) -> InputTransform:
    return InputTransform(
        build_evaluation_transform(config), config.dataset.mean, config.dataset.std
    )
