"""Batches of images, which processes load: what they hand over, and how they begin and end."""

import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from reproduction.errors import STOP_SIGNALS, OneLineError


class Example(NamedTuple):
    """An image for the model."""

    place: int  # in its half
    image: Tensor  # 3 s s, uint8
    target: int


class Batch(NamedTuple):
    """Examples as the model takes them."""

    images: Tensor  # b 3 s s, uint8
    classes: Tensor  # b
    places: list[int]  # b, of the images in their half


class Loader:
    """Yields batches, which worker processes load; an error is that of the worker."""

    def __init__(
        self,
        images: Any,  # by keys, of which `__getitems__` gets those of a batch
        batches: Iterable[list[Any]],
        workers: int,
        pin: bool,
    ):
        context = None
        if workers > 0:
            _end_workers_at_exit()
            context = "fork"  # shares images in memory; spawned ranks would default to spawning
        self._loader: Any = DataLoader(
            _ErrorsAsValues(images),
            batch_sampler=batches,
            collate_fn=_collated_or_error,
            num_workers=workers,
            multiprocessing_context=context,
            persistent_workers=workers > 0,
            pin_memory=pin,
            worker_init_fn=_begin_worker,
            generator=torch.Generator(),  # worker seeds must not draw from dropout's generator
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        """Lets the workers begin at once."""
        return self._unpacked(iter(self._loader))

    def _unpacked(self, batches: Iterator[Batch | OneLineError]) -> Iterator[Batch]:
        for batch in batches:
            if isinstance(batch, OneLineError):
                raise type(batch)(batch)  # a new one: this frame, which holds `batch`, is not in it
            yield batch


@dataclass(frozen=True)
class _ErrorsAsValues(Dataset[Any]):
    """Returns an error that ends the run: raised in a worker, torch would turn it into text."""

    images: Any

    def __getitems__(self, keys: list[Any]) -> list[Example] | OneLineError:
        try:
            return self.images.__getitems__(keys)
        except OneLineError as error:
            return error


def _collated_or_error(examples: list[Example] | OneLineError) -> Batch | OneLineError:
    if isinstance(examples, OneLineError):
        return examples
    return collated(examples)


def collated(examples: list[Example]) -> Batch:
    """Returns examples as a batch; in a worker in memory that it shares."""
    images, classes = default_collate([(x.image, x.target) for x in examples])
    return Batch(images, classes, [x.place for x in examples])


def _begin_worker(worker: int) -> None:
    """Keeps a worker running until its parent ends it, if a signal reaches the process group."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


@cache
def _end_workers_at_exit() -> None:
    """Registers `_end_workers`, also for the end of multiprocessing processes."""
    Finalize(None, _end_workers, exitpriority=0)


def _end_workers() -> None:
    """Kills workers that are left: multiprocessing's SIGTERM, which they ignore, ends none."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # silences torch's report of killed workers
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
