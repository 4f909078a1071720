"""Small folders of images, decoded once and held in memory."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
from torch.utils.data import Subset

from reproduction.data.sources import ArrayImages, ImageSource, image_size, load_image

MIB = 2**20
CHANNELS = 3


def held(images: ImageSource, mib: int, threads: int) -> ImageSource:
    """The images of a folder, decoded now if all of them fit into `mib`, else as they are.

    What is held stays as it is, so that processes that are forked later share its pages.
    RuntimeError names a file that is not readable.
    """
    paths = _paths(images)
    if not _fit(paths, mib * MIB):
        return images
    with ThreadPoolExecutor(threads) as pool:  # decoding lets other threads run
        return ArrayImages(list(pool.map(_decode, paths)), images.targets)


def _paths(images: Any) -> list[str]:
    """The files of an ImageFolder, or of a part of one."""
    if isinstance(images, Subset):
        paths = _paths(images.dataset)
        return [paths[index] for index in cast(list[int], images.indices)]
    return [path for path, _ in images.samples]


def _fit(paths: Iterable[str], room: int) -> bool:
    """Whether decoded images take `room` bytes at most; looks at no more headers than needed."""
    for path in paths:
        width, height = image_size(path)
        room -= width * height * CHANNELS
        if room < 0:
            return False
    return True


def _decode(path: str) -> np.ndarray:
    return np.array(load_image(path))
