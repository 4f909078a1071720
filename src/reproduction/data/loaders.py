"""Loaders whose batches depend on seed and epoch only, not on workers or world size."""

import math
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.util import Finalize, get_temp_dir
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, default_collate

from reproduction.config import Config
from reproduction.data.images import NoImage, read, rgb, upright
from reproduction.data.inputs import build_normalize
from reproduction.data.seeding import Purpose, preserved_generators, seed_generators
from reproduction.data.sources import Half, Unreadable, check_share
from reproduction.system import STOP_SIGNALS, OneLineError, PlainError, UserError

RATIO = (0.75, 1.3333)  # of a random crop, width / height
Transform = Callable[[Image.Image], Tensor]

# The name of a socket has at most 107 bytes; this is what multiprocessing adds to TMPDIR.
LONGEST_TMPDIR = 107 - len("/pymp-12345678/listener-12345678")
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108


class Example(NamedTuple):
    """An image for the model, and what was tried before it: index and reason of each image."""

    image: Tensor  # 3 s s, uint8
    target: int
    unreadable: dict[int, str]


class Batch(NamedTuple):
    """Examples as the model takes them."""

    images: Tensor  # b 3 s s, uint8
    classes: Tensor  # b
    unreadable: dict[int, str]


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
        unreadable: dict[int, str] = {}
        image, target = self._readable(index, unreadable)
        seed_generators(Purpose.AUGMENT, self.seed, epoch, index)
        return Example(self.transform(image), target, unreadable)

    def _readable(self, index: int, unreadable: dict[int, str]) -> tuple[Image.Image, int]:
        """The image at an index or, in its place, the next one that is readable, with its class."""
        while True:
            try:
                return self.half[index]
            except Unreadable as error:
                unreadable[index] = str(error)
                check_share(unreadable, self.half)
                index = (index + 1) % len(self.half)


@dataclass(frozen=True)
class EvaluationImages(Dataset[Example]):
    """Images for evaluation, where no other one can take the place of an unreadable one."""

    half: Half
    transform: Transform

    def __getitem__(self, index: int) -> Example:
        try:
            image, target = self.half[index]
        except Unreadable as error:
            raise PlainError(f"{error}; in evaluation no other image takes its place") from error
        return Example(self.transform(image), target, {})

    def __getitems__(self, indices: list[int]) -> list[Example]:
        return [self[index] for index in indices]


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


class Worker(ForkProcess):
    """A process that loads images, to be told from other children of this process."""


class Workers(ForkContext):
    """Forks workers, which shares images in memory; spawned ranks would default to spawning."""

    Process = Worker


class Loader:
    """Yields images `b 3 s s`, uint8, and classes `b`, which worker processes load.

    `unreadable` has the images whose place others have taken in the batches so far, by index, with
    the reason. What ends the run is raised as the worker has raised it.
    """

    def __init__(
        self,
        images: TrainingImages | EvaluationImages,
        batches: Iterable[list[Any]],
        workers: int,
        pin: bool,
    ):
        self.half = images.half
        self.unreadable: dict[int, str] = {}
        if workers > 0:
            _end_workers_at_exit()
            _choose_socket_folder()
        self._loader: Any = DataLoader(
            _Whole(images),
            batch_sampler=batches,
            collate_fn=_collated_if_whole,
            num_workers=workers,
            multiprocessing_context=Workers() if workers else None,
            persistent_workers=workers > 0,
            pin_memory=pin,
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # worker seeds must not draw from dropout's generator
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[Tensor]]:
        """Lets the workers begin at once."""
        return self._checked(iter(self._loader))

    def _checked(self, batches: Iterator[Batch | OneLineError]) -> Iterator[list[Tensor]]:
        for batch in batches:
            if isinstance(batch, OneLineError):
                raise batch
            self.unreadable |= batch.unreadable
            yield [batch.images, batch.classes]


def build_training_loader(
    config: Config, half: Half, batches: TrainingBatches, pin: bool
) -> Loader:
    """Returns the loader of this rank's batches."""
    return Loader(build_training_images(config, half), batches, config.workers, pin)


def build_evaluation_loader(config: Config, half: Half, rank: int, ranks: int, pin: bool) -> Loader:
    """Returns the loader of this rank's share of the images: each exactly once, without padding."""
    images = EvaluationImages(half, build_evaluation_transform(config))
    size = max(1, config.recipe.batch_size // ranks)
    batches = BatchSampler(range(rank, len(half), ranks), size, drop_last=False)
    return Loader(images, batches, config.workers, pin)


@dataclass(frozen=True)
class _Whole(Dataset[Any]):
    """Returns the error that ends a run: torch would make a text of one that a worker raises."""

    images: TrainingImages | EvaluationImages

    def __getitems__(self, keys: list[Any]) -> list[Example] | OneLineError:
        try:
            return self.images.__getitems__(keys)
        except OneLineError as error:
            return error


def _collated_if_whole(examples: list[Example] | OneLineError) -> Batch | OneLineError:
    return examples if isinstance(examples, OneLineError) else collated(examples)


def collated(examples: list[Example]) -> Batch:
    """Returns examples as a batch; in a worker in memory that it shares."""
    images, classes = default_collate([(x.image, x.target) for x in examples])
    unreadable: dict[int, str] = {}
    for example in examples:
        unreadable |= example.unreadable
    return Batch(images, classes, unreadable)


def _ignore_signals(worker: int) -> None:
    """Keeps a worker running until its parent ends it, if a signal reaches the process group."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


@cache
def _end_workers_at_exit() -> None:
    """Also at the end of multiprocessing processes."""
    Finalize(None, _end_workers, exitpriority=0)


def _end_workers() -> None:
    """Kills workers that are still referenced, as by the traceback of an error.

    Otherwise multiprocessing sends SIGTERM, which they ignore, and waits forever.
    """
    workers = [x for x in multiprocessing.active_children() if isinstance(x, Worker)]
    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # silences torch's report of killed workers
        for worker in workers:
            worker.kill()


def _choose_socket_folder() -> None:
    """Lets multiprocessing make its folder where the names of its sockets are short enough.

    Workers send images through sockets in it. If TMPDIR were too long, they would wait forever.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= LONGEST_TMPDIR:
        return
    writable = [folder for folder in SHORT_FOLDERS if os.access(folder, os.W_OK | os.X_OK)]
    if not writable:
        raise UserError(f"TMPDIR={usual}: has more than {LONGEST_TMPDIR} bytes")
    tempfile.tempdir = writable[0]
    try:
        get_temp_dir()  # which is kept, also by the workers
    finally:
        tempfile.tempdir = usual


@dataclass(frozen=True)
class InputTransform:
    """A PIL image of any mode, or a path -> the model's input in evaluation, `3 s s` float32.

    A list of n of them gives `n 3 s s`. Images are seen upright and on white. ValueError names a
    broken file, or is for a PIL image of more than 8 bits a channel.
    """

    crop: Transform
    mean: list[float]
    std: list[float]

    def __call__(self, images: Any) -> Tensor:
        if isinstance(images, list | tuple):
            return torch.stack([self(image) for image in images])
        normalize = build_normalize(self.mean, self.std, "cpu")
        return normalize(self.crop(_shown(images)))


def _shown(image: Any) -> Image.Image:
    """A PIL image, or that of a path, as viewers show it."""
    if not isinstance(image, str | os.PathLike):
        return rgb(upright(image))
    path = os.fspath(image)
    try:
        return read(path)
    except NoImage as error:
        raise ValueError(f"{path}: {error}") from error


def build_input_transform(config: Config) -> InputTransform:
    return InputTransform(
        build_evaluation_transform(config), config.dataset.mean, config.dataset.std
    )
