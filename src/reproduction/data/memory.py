"""Small folders of images, decoded once and held in memory."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import numpy as np
from PIL import Image
from torch.utils.data import Subset

from reproduction.data.images import image_size, load_image
from reproduction.data.sources import ArrayImages, ImageSource

MIB = 2**20
CHANNELS = 3


class HeldImages(ArrayImages):
    """Images of which some may be broken: text that says why is in their place."""

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        if isinstance(self.images[index], str):
            raise RuntimeError(self.images[index])
        return super().__getitem__(index)


def held(images: ImageSource, mib: int, threads: int, skips: bool = False) -> ImageSource:
    """The images of a folder, decoded now if all of them fit into `mib`, else as they are.

    What is held stays as it is, so that processes that are forked later share its pages.
    RuntimeError names a file that is not readable, now or, if it is skipped, when it is asked for.
    """
    paths = _paths(images)
    if not _fit(paths, mib * MIB, skips):
        return images
    with ThreadPoolExecutor(threads) as pool:  # decoding lets other threads run
        return HeldImages(list(pool.map(partial(_decode, skips=skips), paths)), images.targets)


def _paths(images: Any) -> list[str]:
    """The files of a folder's images, or of a part of them."""
    if isinstance(images, Subset):
        paths = _paths(images.dataset)
        return [paths[index] for index in cast(list[int], images.indices)]
    return [path for path, _ in images.samples]


def _fit(paths: Iterable[str], room: int, skips: bool) -> bool:
    """Whether decoded images take `room` bytes at most; looks at no more headers than needed."""
    for path in paths:
        room -= _bytes(path, skips)
        if room < 0:
            return False
    return True


def _bytes(path: str, skips: bool) -> int:
    try:
        width, height = image_size(path)
    except RuntimeError:
        if not skips:
            raise
        return 0
    return width * height * CHANNELS


def _decode(path: str, skips: bool) -> Any:
    """Pixels, or why there are none if such a file is skipped."""
    try:
        return np.array(load_image(path))
    except RuntimeError as error:
        if not skips:
            raise
        return str(error)
