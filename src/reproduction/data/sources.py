"""The five data sets as pairs of (PIL image, class index) with the published split."""

import fcntl
import os
import socket
import tarfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.utils import download_and_extract_archive

from reproduction.data.folders import EXTENSIONS, class_names, image_files, split_folders
from reproduction.data.images import ArrayImages, FileImages, ImageSource
from reproduction.data.stand_ins import STAND_INS, cifar_stand_ins
from reproduction.system.errors import UserError, first_line

HELD_OUT_DIGITS = 360  # of 1,797, stratified
SILENCE = 60  # seconds after which a server that sends nothing is given up


@dataclass(frozen=True)
class Source:
    """A data set: what to train on, what to evaluate on, and the names of the classes."""

    train: ImageSource
    held_out: ImageSource
    classes: list[str]


def load_source(name: str, root: str | None, limit: int | None) -> Source:
    """Opens a data set, downloading CIFAR on first use; keeps `limit` training images if given.

    Raises UserError when the download fails or `limit` exceeds the training images.
    """
    source = _open(name, root)
    return source if limit is None else replace(source, train=_limited(source.train, limit))


@lru_cache(maxsize=1)
def _open(name: str, root: str | None) -> Source:
    """Opens a data set once for all points of a sweep; nothing changes it."""
    return _LOADERS[name](name, root)


def _limited(images: ImageSource, limit: int) -> ImageSource:
    """The first `limit` images when classes take turns, so that classes stay balanced."""
    if limit > len(images):
        raise UserError(f"dataset.limit={limit}: there are {len(images)} training images")
    targets = np.asarray(images.targets)
    turn = np.empty(len(targets), dtype=np.int64)
    for label in np.unique(targets):
        members = np.flatnonzero(targets == label)
        turn[members] = np.arange(len(members))
    return images.take(np.lexsort((targets, turn))[:limit].tolist())


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
    """torchvision's, which unpickles no file of another MD5 than its lists say."""
    kind: Any = {"cifar10": CIFAR10, "cifar100": CIFAR100}[name]
    place = Path(str(root)).expanduser()
    if os.path.lexists(place / kind.base_folder / STAND_INS):
        train, held_out = (ArrayImages(*half) for half in cifar_stand_ins(name))
        return Source(train, held_out, [f"stand-in {label}" for label in sorted({*train.targets})])
    with suppress(OSError, RuntimeError):  # it is not there and whole
        return _read(kind, place)
    try:
        return _fetched(kind, place)
    except (OSError, RuntimeError, ValueError, tarfile.TarError) as error:
        raise UserError(
            f"dataset.root={root}: {name} is not there and could not be downloaded "
            f"({first_line(error)}); put {kind.url} (MD5 {kind.tgz_md5}, not unpacked) into "
            f"{place.absolute()}"
        ) from error


def _read(kind: Any, place: Path) -> Source:
    """RuntimeError or OSError of a file that is not there, or not as it should be."""
    with warnings.catch_warnings(action="ignore"):  # numpy's, of what an old one has pickled
        halves = [kind(place, train=is_train) for is_train in (True, False)]
    train, held_out = (ArrayImages(half.data, half.targets) for half in halves)
    return Source(train, held_out, halves[0].classes)


def _fetched(kind: Any, place: Path) -> Source:
    """Downloads and unpacks the archive; one process does it, others wait."""
    place.mkdir(parents=True, exist_ok=True)
    with (place / f".{kind.filename}.lock").open("a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # until it is closed: the system closes a killed one's
        with suppress(OSError, RuntimeError):
            return _read(kind, place)
        patience = socket.getdefaulttimeout()
        socket.setdefaulttimeout(SILENCE)
        try:
            download_and_extract_archive(kind.url, place, filename=kind.filename, md5=kind.tgz_md5)
        finally:
            socket.setdefaulttimeout(patience)
        return _read(kind, place)


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
