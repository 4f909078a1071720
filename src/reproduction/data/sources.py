"""The five data sets as pairs of (PIL image, class index) with the published split."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from PIL import Image
from torch.utils.data import Subset

from reproduction.data.folders import EXTENSIONS, class_names, image_files, split_folders
from reproduction.data.images import load_image
from reproduction.errors import UserError

HELD_OUT_DIGITS = 360  # of 1,797, stratified


class ImageSource(Protocol):
    """Images by index, RuntimeError names a broken one; `targets` are known without decoding."""

    targets: list[int]

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[Image.Image, int]: ...


@dataclass(frozen=True)
class Source:
    """A data set: what to train on, what to evaluate on, and the names of the classes."""

    train: ImageSource
    held_out: ImageSource
    classes: list[str]


class ArrayImages:
    """Images held in memory: each is uint8, `h w` if grey, else `h w 3`."""

    def __init__(self, images: Sequence[np.ndarray] | np.ndarray, targets: Iterable[int]):
        self.images, self.targets = images, [int(t) for t in targets]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        image = Image.fromarray(self.images[index])  # a copy: what is held stays as it is
        return image if image.mode == "RGB" else image.convert("RGB"), self.targets[index]


class FileImages:
    """Images that are read from their files, each when it is asked for."""

    def __init__(self, samples: list[tuple[str, int]]):
        self.samples, self.targets = samples, [target for _, target in samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        path, target = self.samples[index]
        return load_image(path), target


def load_source(name: str, root: str | None, limit: int | None) -> Source:
    """Opens a data set, downloading CIFAR on first use; keeps `limit` training images if given.

    Raises UserError when the download fails or `limit` exceeds the training images.
    """
    source = _open(name, root)
    if limit is None:
        return source
    return Source(limited(source.train, limit), source.held_out, source.classes)


@lru_cache(maxsize=1)
def _open(name: str, root: str | None) -> Source:
    """Opens a data set once for all points of a sweep; nothing changes it."""
    return _LOADERS[name](name, root)


def limited(images: ImageSource, limit: int) -> ImageSource:
    """The first `limit` images when classes take turns, so that classes stay balanced."""
    if limit > len(images):
        raise UserError(f"dataset.limit={limit}: there are {len(images)} training images")
    targets = np.asarray(images.targets)
    turn = np.empty(len(targets), dtype=np.int64)
    for label in np.unique(targets):
        members = np.flatnonzero(targets == label)
        turn[members] = np.arange(len(members))
    kept = np.lexsort((targets, turn))[:limit]
    subset = Subset(cast(Any, images), kept.tolist())
    subset.targets = targets[kept].tolist()  # type: ignore[attr-defined]
    return cast(ImageSource, subset)


def _digits(name: str, root: str | None) -> Source:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    images = np.round(bunch.images * 255 / 16).astype(np.uint8)  # 16 levels of ink
    train, held_out = train_test_split(
        np.arange(len(images)),
        test_size=HELD_OUT_DIGITS,
        stratify=bunch.target,
        random_state=0,
    )
    return Source(
        ArrayImages(images[train], bunch.target[train]),
        ArrayImages(images[held_out], bunch.target[held_out]),
        [str(digit) for digit in bunch.target_names],
    )


def _cifar(name: str, root: str | None) -> Source:
    from reproduction.data.cifar import read_cifar  # torchvision takes a second to import

    train, held_out, classes = read_cifar(name, str(root))
    return Source(ArrayImages(*train), ArrayImages(*held_out), classes)


def _folders(name: str, root: str | None) -> Source:
    folders = split_folders(str(root))
    assert folders is not None, "the configuration has checked the folders"
    classes = class_names(folders[0])
    try:
        train, held_out = (FileImages(_samples(folder, classes)) for folder in folders)
    except OSError as error:
        raise UserError(f"dataset.root={root}: {error}") from error
    return Source(train, held_out, classes)


def _samples(folder: Path, classes: list[str]) -> list[tuple[str, int]]:
    """Every file with its class; OSError as of image_files, or names a class without images."""
    samples = []
    for label, name in enumerate(classes):
        files = image_files(folder / name)
        if not files:
            raise FileNotFoundError(f"{folder / name} holds no images ({', '.join(EXTENSIONS)})")
        samples += [(file, label) for file in files]
    return samples


_LOADERS: dict[str, Callable[[str, str | None], Source]] = {
    "digits": _digits,
    "cifar10": _cifar,
    "cifar100": _cifar,
    "imagenet1k": _folders,
    "image_folder": _folders,
}
