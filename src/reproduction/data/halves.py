"""An opened data set: its halves, whose images are read from files or held in memory."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image
from torchvision.datasets import DatasetFolder

from reproduction.data.images import NoImage, rgb
from reproduction.errors import PlainError

MOST_SIZES = 10**5  # files whose sizes are read; those of ImageNet may take minutes


class Items(Protocol):
    """What a function returns: images with their classes. It may have `targets` and `classes`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class Half:
    """Images to train on, for validation, or held out: `half[i]` is an RGB image and its class.

    They are those of `items` at `places`; classes are indices.
    """

    items: Items
    targets: list[int]
    places: Sequence[int]

    @classmethod
    def of(cls, items: Items, targets: Sequence[int]) -> "Half":
        """All images of `items`."""
        return cls(items, list(targets), range(len(targets)))

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """Raises PlainError, which names the image, for one that cannot be read."""
        try:
            return rgb(self.items[self.places[index]][0]), self.targets[index]
        except (NoImage, OSError) as error:  # the second also of a function of one's own
            raise PlainError(f"image {self.name(index)}: {error}") from error

    @property
    def folder(self) -> DatasetFolder | None:
        """What has found the files of the images, if they are files of a folder."""
        if isinstance(self.items, DatasetFolder):
            return self.items
        return None

    def name(self, index: int) -> str:
        """The path of an image, or its place in the data set."""
        place = self.places[index]
        if self.folder is None:
            return str(place)
        return str(self.folder.samples[place][0])

    def take(self, indices: Sequence[int]) -> "Half":
        targets = [self.targets[i] for i in indices]
        places = [self.places[i] for i in indices]
        return replace(self, targets=targets, places=places)

    def content(self, classes: list[str]) -> list[str]:
        """What distinguishes images: names and sizes of files, else their classes."""
        if self.folder is None:
            return [classes[target] for target in self.targets]
        names = [self.name(index) for index in range(len(self))]
        root = str(self.folder.root)
        pairs = zip(_sizes(names), names, strict=True)
        return [f"{size} {name.removeprefix(root)}" for size, name in pairs]

    @property
    def is_listed(self) -> bool:
        """Whether a function has returned all images at once."""
        return isinstance(self.items, list | tuple)

    def pixels(self) -> Iterator[bytes]:
        """The content of each image."""
        for place in self.places:
            image = np.asarray(self.items[place][0])
            yield f"{image.dtype} {image.shape}".encode() + image.tobytes()


def _sizes(paths: list[str]) -> list[int]:
    """The bytes of files; 0 if there are too many to ask."""
    if len(paths) > MOST_SIZES:
        return [0] * len(paths)
    return [os.path.getsize(path) for path in paths]


class Data(NamedTuple):
    """A data set. `validation` is a part of the training images, or a folder of its own."""

    train: Half
    held_out: Half
    classes: list[str]
    validation: Half | None = None

    @property
    def per_epoch(self) -> Half:
        """The images to evaluate on after an epoch: for validation, else the held-out ones."""
        if self.validation is None:
            return self.held_out
        return self.validation
