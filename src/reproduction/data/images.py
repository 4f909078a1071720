"""Images by index: arrays in memory, files, or files that were decoded into memory.

A broken file is named, and nothing but pixels comes of any.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, Self

import numpy as np
from PIL import Image

NO_IMAGE = "no readable image"
SKIPPING = "dataset.broken_images=skip leaves such files out"
# Of all that Pillow knows, by content whatever the name; others can start programs, as EPS does.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
MIB = 2**20
CHANNELS = 3


class ImageSource(Protocol):
    """Images by index, RuntimeError names a broken one; `targets` are known without decoding."""

    targets: list[int]

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[Image.Image, int]: ...
    def take(self, indices: list[int]) -> Self: ...


class ArrayImages:
    """Images held in memory: each is uint8, `h w` if grey, else `h w 3`."""

    def __init__(self, images: Sequence[np.ndarray] | np.ndarray, targets: Iterable[int]):
        self.images, self.targets = images, [int(t) for t in targets]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        image = Image.fromarray(self.images[index])  # a copy: what is held stays as it is
        return image if image.mode == "RGB" else image.convert("RGB"), self.targets[index]

    def take(self, indices: list[int]) -> Self:
        return type(self)([self.images[i] for i in indices], [self.targets[i] for i in indices])


class HeldImages(ArrayImages):
    """Images of which some may be broken: text that says why is in their place."""

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        if isinstance(self.images[index], str):
            raise RuntimeError(self.images[index])
        return super().__getitem__(index)


class FileImages:
    """Images that are read from their files, each when it is asked for."""

    def __init__(self, samples: list[tuple[str, int]]):
        self.samples, self.targets = samples, [target for _, target in samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        path, target = self.samples[index]
        return load_image(path), target

    def take(self, indices: list[int]) -> Self:
        return type(self)([self.samples[i] for i in indices])


def held(images: ImageSource, mib: int, threads: int, skips: bool = False) -> ImageSource:
    """The images of a folder, decoded now if all of them fit into `mib`, else as they are.

    What is held stays as it is, so that processes that are forked later share its pages.
    RuntimeError names a file that is not readable, now or, if it is skipped, when it is asked for.
    """
    assert isinstance(images, FileImages), "other images are in memory"
    paths = [path for path, _ in images.samples]
    if not _fit(paths, mib * MIB, skips):
        return images
    with ThreadPoolExecutor(threads) as pool:  # decoding lets other threads run
        return HeldImages(list(pool.map(partial(_decode, skips=skips), paths)), images.targets)


def _fit(paths: Iterable[str], room: int, skips: bool) -> bool:
    """Whether decoded images take `room` bytes at most; looks at no more headers than needed."""
    for path in paths:
        try:
            width, height = image_size(path)
        except RuntimeError:
            if not skips:
                raise
            continue
        room -= width * height * CHANNELS
        if room < 0:
            return False
    return True


def _decode(path: str, skips: bool) -> Any:
    """Pixels, or why there are none if such a file is skipped."""
    try:
        return np.array(load_image(path))
    except RuntimeError as error:
        if not skips:
            raise
        return str(error)


def load_image(path: str) -> Image.Image:
    """An RGB image; RuntimeError names a file that is broken or has more than 8 bits a channel."""
    with _opened(path) as image:
        return image.convert("RGB")


def image_size(path: str) -> tuple[int, int]:
    """Width and height by the header; RuntimeError as above."""
    with _opened(path) as image:
        return image.size


@contextmanager
def _opened(path: str) -> Iterator[Image.Image]:
    try:
        if not os.path.isfile(path):
            raise ValueError("there is no such file")  # a pipe would never end
        with Image.open(path, formats=FORMATS) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"{image.mode} pixels, convert them to 8 bits a channel")
            yield image
    except Exception as error:  # Pillow's readers raise any of a broken file
        shown = path if path.isprintable() else ascii(path)  # a name may hold a newline
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RuntimeError(f"{shown}: {NO_IMAGE}: {reason}") from error
