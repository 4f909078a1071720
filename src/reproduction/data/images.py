"""Image sources: arrays in memory, files, and files cached in memory."""

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
# Formats that Pillow may open, detected by content. Others can start programs, such as EPS.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
MIB = 2**20
CHANNELS = 3


class ImageSource(Protocol):
    """Images by index. RuntimeError names a broken one; `targets` need no decoding."""

    targets: list[int]

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[Image.Image, int]: ...
    def take(self, indices: list[int]) -> Self: ...


class ArrayImages:
    """Images in memory: uint8 arrays, `h w` if grey, else `h w 3`."""

    def __init__(self, images: Sequence[np.ndarray] | np.ndarray, targets: Iterable[int]):
        self.images, self.targets = images, [int(t) for t in targets]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        image = Image.fromarray(self.images[index])  # a copy, so that the array stays unchanged
        return image if image.mode == "RGB" else image.convert("RGB"), self.targets[index]

    def take(self, indices: list[int]) -> Self:
        return type(self)([self.images[i] for i in indices], [self.targets[i] for i in indices])


class CachedImages(ArrayImages):
    """Decoded images; a broken one is replaced by its error message."""

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        if isinstance(self.images[index], str):
            raise RuntimeError(self.images[index])
        return super().__getitem__(index)


class FileImages:
    """Images that are read from their files on access."""

    def __init__(self, samples: list[tuple[str, int]]):
        self.samples, self.targets = samples, [target for _, target in samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        path, target = self.samples[index]
        return load_image(path), target

    def take(self, indices: list[int]) -> Self:
        return type(self)([self.samples[i] for i in indices])


def cache_in_memory(
    images: ImageSource, mib: int, threads: int, skips: bool = False
) -> ImageSource:
    """Decodes all images of a folder if they fit into `mib`, otherwise returns `images`.

    Forked processes share the memory. RuntimeError names a broken file, at once or, if it is
    skipped, on access.
    """
    assert isinstance(images, FileImages), "other images are in memory already"
    paths = [path for path, _ in images.samples]
    if not _fits(paths, mib * MIB, skips):
        return images
    with ThreadPoolExecutor(threads) as pool:  # decoding releases the GIL
        return CachedImages(list(pool.map(partial(_decode, skips=skips), paths)), images.targets)


def _fits(paths: Iterable[str], room: int, skips: bool) -> bool:
    """Whether the decoded images take at most `room` bytes. Stops once they do not."""
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
    """Returns the pixels, or the error message of a broken file that is skipped."""
    try:
        return np.array(load_image(path))
    except RuntimeError as error:
        if not skips:
            raise
        return str(error)


def load_image(path: str) -> Image.Image:
    """Loads as RGB. RuntimeError names a file that is broken or exceeds 8 bits per channel."""
    with _open_image(path) as image:
        return image.convert("RGB")


def image_size(path: str) -> tuple[int, int]:
    """Returns width and height from the header. RuntimeError as for `load_image`."""
    with _open_image(path) as image:
        return image.size


@contextmanager
def _open_image(path: str) -> Iterator[Image.Image]:
    try:
        if not os.path.isfile(path):
            raise ValueError("there is no such file")  # a pipe would block
        with Image.open(path, formats=FORMATS) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"{image.mode} pixels, convert them to 8 bits a channel")
            yield image
    except Exception as error:  # Pillow raises errors of any type
        shown = path if path.isprintable() else ascii(path)  # a name may hold a newline
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RuntimeError(f"{shown}: {NO_IMAGE}: {reason}") from error
