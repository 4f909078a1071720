"""Loaders whose batches depend on seed and epoch only, not on workers or world size."""

import math
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from shutil import disk_usage
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from reproduction.data.images import LEFT_OUT, NO_IMAGE, ImageSource
from reproduction.data.seeding import Purpose, preserved_generators, seed_generators
from reproduction.system.errors import STOP_SIGNALS, UserError

LONGEST_FOLDER = 75  # bytes: a socket's path has 107, multiprocessing appends 32
SHORT_FOLDER = "/tmp"  # noqa: S108 - the workers create a private folder in it
SHARED = Path("/dev/shm")  # noqa: S108 - workers send batches through it
SEMAPHORES = 2**15  # bytes for each worker of both loaders: 3 semaphores, which are pages
ENLARGE = (
    "enlarge it, as by docker run --shm-size=8g, or choose dataset.workers=0, which needs none"
)
START = "fork"  # shares images in memory; spawned ranks would default to another method
Transform = Callable[[Image.Image], Tensor]
Example = tuple[Tensor, int]


class TrainingImages(Dataset[Example]):
    """Augmented images. The augmentation depends on (seed, epoch, index) only.

    The next readable image replaces one that is left out, so that batches keep their size.
    """

    def __init__(self, source: ImageSource, transform: Transform, seed: int):
        self.source, self.transform, self.seed = source, transform, seed

    def __getitem__(self, key: tuple[int, int]) -> Example:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Example]:
        """Loads a batch, so that generators are saved once per batch instead of per image."""
        with preserved_generators():
            return [self._augmented(*key) for key in keys]

    def _augmented(self, epoch: int, index: int) -> Example:
        image, target = self._readable(index)
        seed_generators(Purpose.AUGMENT, self.seed, epoch, index)
        return self.transform(image), target

    def _readable(self, index: int) -> tuple[Image.Image, int]:
        number = len(self.source)
        for other in range(index, index + number):
            image, target = self.source[other % number]
            if target != LEFT_OUT:
                return image, target
        raise RuntimeError(f"{NO_IMAGE} among the {number} training images")


class EvaluationImages(Dataset[Example]):
    """Images in evaluation; one that is left out keeps its class LEFT_OUT."""

    def __init__(self, source: ImageSource, transform: Transform):
        self.source, self.transform = source, transform

    def __getitem__(self, index: int) -> Example:
        image, target = self.source[index]
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


def evaluation_batches(num_images: int, size: int, rank: int = 0, ranks: int = 1) -> BatchSampler:
    """Splits the images over all ranks, each exactly once, without padding."""
    return BatchSampler(range(rank, num_images, ranks), size, drop_last=False)


def data_loader(
    images: TrainingImages | EvaluationImages,
    batches: Iterable[list[Any]],
    workers: int,
    pin_memory: bool,
) -> DataLoader[Example]:
    """Returns a loader of `batches`, which are lists of keys."""
    if workers:
        _check_places(workers)
    return DataLoader(
        images,
        batch_sampler=batches,
        num_workers=workers,
        multiprocessing_context=START if workers else None,
        persistent_workers=workers > 0,
        pin_memory=pin_memory,
        worker_init_fn=_prepare_worker,
        generator=torch.Generator(),  # worker seeds must not draw from dropout's generator
    )


def _prepare_worker(worker: int) -> None:
    """Keeps a worker running until its parent ends it, if a signal reaches the process group."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    tempfile.tempdir = _socket_folder()


def _socket_folder() -> str:
    """The temporary folder, or /tmp if the paths of sockets in it would be too long to listen at.

    Workers send batches through sockets: the loader would wait forever.
    """
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= LONGEST_FOLDER else SHORT_FOLDER


def _check_places(workers: int) -> None:
    """Raises UserError if the sockets or semaphores of workers have no place."""
    if not os.access(_socket_folder(), os.W_OK | os.X_OK):
        longest = f"{LONGEST_FOLDER} bytes at most, as {SHORT_FOLDER} is not writable"
        raise UserError(f"TMPDIR={tempfile.gettempdir()}: {longest}; or choose dataset.workers=0")
    if SHARED.is_dir() and (free := disk_usage(SHARED).free) < SEMAPHORES * (workers + 2):
        raise UserError(f"{SHARED}: has only {free} bytes of shared memory left; {ENLARGE}")


def _end_workers() -> None:
    """Kills workers that are still referenced, as by the traceback of an error.

    Otherwise multiprocessing sends SIGTERM, which they ignore, and waits forever.
    """
    if workers := [child for child in multiprocessing.active_children() if child.daemon]:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # silences torch's report of killed workers
        for worker in workers:
            worker.kill()


Finalize(None, _end_workers, exitpriority=0)  # also runs at the end of multiprocessing processes
