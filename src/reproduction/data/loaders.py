"""Batches that depend on seed and epoch alone, not on workers or the number of processes.

An image whose file is not readable can be left out of its batch; it is named once, and counted.
"""

import math
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, default_collate

from reproduction.data.images import ImageSource
from reproduction.data.seeding import Purpose, generators_kept, seed_generators
from reproduction.system.errors import STOP_SIGNALS, UserError
from reproduction.system.terminal import warn

START = "fork"  # shares images in memory; ranks that we start ourselves would have another
Transform = Callable[[Image.Image], Tensor]
Batch = list[Tensor]  # images, classes


class Broken(NamedTuple):
    """What comes in place of an image: its number and why it cannot be read, with the file."""

    number: int
    reason: str


Item = tuple[Tensor, int] | Broken


def loaded(images: ImageSource, index: int, skips: bool) -> tuple[Image.Image, int] | Broken:
    """An image and its class; of a broken one RuntimeError, or Broken if such are skipped."""
    try:
        return images[index]
    except RuntimeError as error:
        if not skips:
            raise
        return Broken(index, str(error))


def collate_readable(items: Sequence[Any]) -> tuple[Batch, list[Broken]]:
    """The batch without broken images, empty tensors if none is left; and the broken ones."""
    readable = [item for item in items if not isinstance(item, Broken)]
    broken = [item for item in items if isinstance(item, Broken)]
    empty = [torch.empty(0), torch.empty(0, dtype=torch.long)]
    return default_collate(readable) if readable else empty, broken


class TrainingImages(Dataset[Item]):
    """Augmented images; the augmentation is a function of (seed, epoch, index)."""

    def __init__(self, source: ImageSource, transform: Transform, seed: int, skips: bool = False):
        self.source, self.transform, self.seed, self.skips = source, transform, seed, skips

    def __getitem__(self, key: tuple[int, int]) -> Item:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Item]:
        """A batch at once, as a DataLoader asks for it: generators are kept once, not by image."""
        with generators_kept():
            return [self._augmented(*key) for key in keys]

    def _augmented(self, epoch: int, index: int) -> Item:
        item = loaded(self.source, index, self.skips)
        if isinstance(item, Broken):
            return item
        seed_generators(Purpose.AUGMENT, self.seed, epoch, index)
        return self.transform(item[0]), item[1]


class EvaluationImages(Dataset[Item]):
    def __init__(self, source: ImageSource, transform: Transform, skips: bool = False):
        self.source, self.transform, self.skips = source, transform, skips

    def __getitem__(self, index: int) -> Item:
        item = loaded(self.source, index, self.skips)
        return item if isinstance(item, Broken) else (self.transform(item[0]), item[1])


class TrainingBatches(Sampler[list[tuple[int, int]]]):
    """This rank's share of every global batch, as keys (epoch, index).

    Each epoch is a permutation by (seed, epoch), cut into as few global batches of at most
    `batch_size` as possible, whose sizes differ by one image at most: every image comes once, and
    no small rest is left. A rank takes a contiguous share, so the global batches are the same for
    any number of ranks.
    """

    def __init__(self, num_images: int, batch_size: int, seed: int, rank: int = 0, ranks: int = 1):
        self.num_images, self.seed, self.rank, self.ranks = num_images, seed, rank, ranks
        self.num_batches = math.ceil(num_images / batch_size)
        if num_images // self.num_batches < ranks:
            raise UserError(
                f"devices={ranks}: {num_images} training images in batches of {batch_size} leave "
                "some of them without an image"
            )
        self.epoch = self.first = 0

    def start_at(self, epoch: int, first: int) -> None:
        """The next pass gives the batches of `epoch` from the `first` on."""
        self.epoch, self.first = epoch, first

    def __len__(self) -> int:
        return self.num_batches

    def global_size(self, batch: int) -> int:
        """Images of a global batch, over all ranks."""
        return self.num_images // self.num_batches + (batch < self.num_images % self.num_batches)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.num_images)
        for batch in np.array_split(order, self.num_batches)[self.first :]:
            share = np.array_split(batch, self.ranks)[self.rank]
            yield [(self.epoch, int(index)) for index in share]


def evaluation_batches(num_images: int, size: int, rank: int = 0, ranks: int = 1) -> BatchSampler:
    """Every image exactly once over all ranks, without padding."""
    return BatchSampler(range(rank, num_images, ranks), size, drop_last=False)


def data_loader(
    images: TrainingImages | EvaluationImages,
    batches: Iterable[list[Any]],
    workers: int,
    pin_memory: bool,
) -> DataLoader[Item]:
    """Loads `batches`, each the keys of its images."""
    return DataLoader(
        images,
        batch_sampler=batches,
        num_workers=workers,
        multiprocessing_context=START if workers else None,
        persistent_workers=workers > 0,
        pin_memory=pin_memory,
        worker_init_fn=_leave_signals_to_parent,
        collate_fn=collate_readable if images.skips else None,
        generator=torch.Generator(),  # keeps worker seeds from drawing on dropout's generator
    )


class BrokenImages:
    """The broken ones of a run's images that have come up so far; a new one is told on stderr.

    `num_images` is 0 where none is left out.
    """

    def __init__(self, num_images: int):
        self.num_images = num_images
        self.known: set[int] = set()

    def leave_out(self, batches: Iterable[Any], first: int) -> "Readable":
        """What a loader with `collate_readable` gives, its images counted from `first` on."""
        return Readable(batches, self, first)

    def note(self, number: int, reason: str) -> None:
        if number not in self.known:
            self.known.add(number)
            warn(f"warning: left out: {reason}")

    def agree(self, union: Callable[[set[int], int], set[int]]) -> None:
        """Every rank comes to know what any has met, by `World.union`; all have to ask."""
        self.known = union(self.known, self.num_images)


class Readable:
    """The batches of a loader without their broken images, which are noted."""

    def __init__(self, batches: Iterable[Any], broken: BrokenImages, first: int):
        self.batches, self.broken, self.first = batches, broken, first

    def __iter__(self) -> Iterator[Batch]:
        for batch, left_out in self.batches:
            for number, reason in left_out:
                self.broken.note(self.first + number, reason)
            yield batch


def _leave_signals_to_parent(worker: int) -> None:
    """Where a whole group of processes gets a signal, a worker goes on until its parent ends it."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _end_workers() -> None:
    """Ends workers that something still holds, as an error's traceback does.

    Multiprocessing would ask them by a SIGTERM, which they ignore, and wait for ever.
    """
    if workers := [child for child in multiprocessing.active_children() if child.daemon]:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch complains of killed workers
        for worker in workers:
            worker.kill()


Finalize(None, _end_workers, exitpriority=0)  # also where a process of multiprocessing's ends
