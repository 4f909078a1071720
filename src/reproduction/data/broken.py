"""Images whose files are not readable: left out of their batches, named once, and counted."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate

from reproduction.data.sources import ImageSource
from reproduction.stdout import warn

Batch = list[Tensor]  # images, classes


class Broken(NamedTuple):
    """What comes in place of an image: its number and why it cannot be read, with the file."""

    number: int
    reason: str


class World(Protocol):
    """The ranks; see training/distributed.py."""

    @property
    def size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    def sum(self, values: Tensor) -> Tensor: ...


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

    def agree(self, world: World) -> None:
        """Every rank comes to know what any of them has met; all have to ask."""
        if world.size > 1 and self.num_images:
            met = torch.zeros(self.num_images, dtype=torch.int32, device=world.device)
            met[sorted(self.known)] = 1
            self.known = set(world.sum(met).nonzero().flatten().tolist())


class Readable:
    """The batches of a loader without their broken images, which are noted."""

    def __init__(self, batches: Iterable[Any], broken: BrokenImages, first: int):
        self.batches, self.broken, self.first = batches, broken, first

    def __iter__(self) -> Iterator[Batch]:
        for batch, left_out in self.batches:
            for number, reason in left_out:
                self.broken.note(self.first + number, reason)
            yield batch
