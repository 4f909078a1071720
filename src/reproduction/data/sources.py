"""Opens the data sets with their published splits, as (PIL image, class index)."""

import os
import socket
import tarfile
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
from filelock import FileLock
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.utils import download_and_extract_archive

from reproduction.config import Dataset
from reproduction.data.custom import load as load_own
from reproduction.data.folders import (
    DATASETS,
    EXTENSIONS,
    class_names,
    image_files,
    split_folders,
)
from reproduction.data.images import ArrayImages, FileImages, ImageSource, SkippedFiles
from reproduction.data.stand_ins import STAND_INS, cifar_stand_ins
from reproduction.system.errors import UserError, first_line
from reproduction.system.terminal import warn

HELD_OUT_DIGITS = 360  # out of 1,797, stratified
DOWNLOAD_TIMEOUT = 60  # seconds without data from the server


@dataclass(frozen=True)
class Source:
    """A data set: its images, class names and other files by ending.

    `held_out` is the test set. `validation` is a part of the training images that `train` lacks, or
    a folder of its own. `unread` is a folder of other classes.
    """

    train: ImageSource
    held_out: ImageSource
    classes: list[str]
    others: Counter[str] = field(default_factory=Counter)
    validation: ImageSource | None = None
    unread: Path | None = None

    @property
    def per_epoch(self) -> ImageSource:
        """The images to evaluate on after an epoch: for validation, else the held-out ones."""
        return self.held_out if self.validation is None else self.validation


def report_other_files(source: Source) -> None:
    """Warns of files that are left out by their ending, and of a folder of other classes."""
    if source.others:
        counts = ", ".join(f"{count:,} {ending}" for ending, count in source.others.most_common())
        warn(f"warning: files left out by their ending: {counts}")
    if source.unread is not None:
        warn(f"warning: {source.unread} is not read, it has other classes than train/")


def build_source(dataset: Dataset) -> Source:
    """Opens a data set, downloading CIFAR on first use; own data by their function, see custom.py.

    Keeps `limit` training images and `eval_limit` held-out images, if given, and sets the share
    `validation` of the training images apart. Broken files are left out if they are to be skipped,
    see `SkippedFiles`. Raises UserError when the download fails, a limit is out of range, or there
    are too few images for validation, or a folder of them.
    """
    source = open_source(dataset)
    parts = [
        _limited(key, images, getattr(dataset, key), len(source.classes))
        for key, images in (("limit", source.train), ("eval_limit", source.held_out))
    ]
    if dataset.validation and source.validation is not None:
        place = Path(str(dataset.root), "val")
        allowed = f"{place} holds the images for validation, allowed is 0"
        raise UserError(f"dataset.validation={dataset.validation}: {allowed}")
    if dataset.validation:
        parts[0], held_back = _split(parts[0], dataset.validation, dataset.validation_seed)
        parts.append(held_back)
    if source.validation is not None:
        parts.append(source.validation)
    if dataset.skips:
        parts = [_skipped(part) for part in parts]
    train, held_out, *rest = parts
    validation = rest[0] if rest else None
    return replace(source, train=train, held_out=held_out, validation=validation)


def open_source(dataset: Dataset) -> Source:
    """Opens all images of a data set. Raises UserError when the download or the function fails."""
    if dataset.source is None:
        return _open(dataset.name, dataset.root)
    return Source(*load_own(dataset.source, dataset.options))


@lru_cache(maxsize=1)
def _open(name: str, root: str | None) -> Source:
    """Opens a data set. Cached across the points of a sweep, as it is immutable."""
    opens = DATASETS[name].opens
    assert opens is not None, "checked by parse()"
    source: Source = resolve_name(opens)(name, root)
    return source


@lru_cache(maxsize=1)
def _split(images: ImageSource, share: float, seed: int) -> tuple[ImageSource, ImageSource]:
    """Splits images into the rest and a stratified `share`, both in their order."""
    from sklearn.model_selection import train_test_split

    targets = np.asarray(images.targets)
    try:
        parts = train_test_split(
            np.arange(len(targets)), test_size=share, stratify=targets, random_state=seed
        )
    except ValueError as error:
        reason = f"must give images of every class: {error}"
        raise UserError(f"dataset.validation={share}: {reason}") from error
    if lost := {*targets.tolist()} - {*targets[parts[0]].tolist()}:
        raise UserError(f"dataset.validation={share}: leaves class {min(lost)} no training image")
    rest, validation = (images.take(sorted(part.tolist())) for part in parts)
    return rest, validation


@lru_cache(maxsize=3)
def _skipped(images: ImageSource) -> ImageSource:
    """Returns the same object again for the same images, so that each is reported once."""
    assert isinstance(images, FileImages), "checked by parse()"
    return SkippedFiles(images.samples(), images.as_seen)


@lru_cache(maxsize=2)
def _limited(key: str, images: ImageSource, limit: int | None, classes: int) -> ImageSource:
    """Returns the first `limit` images in round-robin order of classes, so they stay balanced."""
    if limit is None:
        return images
    if not classes <= limit <= len(images):
        raise UserError(
            f"dataset.{key}={limit}: there are {len(images)} images of {classes} classes, allowed "
            f"is {classes}..{len(images)}"
        )
    targets = np.asarray(images.targets)
    turn = np.empty(len(targets), dtype=np.int64)
    for label in np.unique(targets):
        members = np.flatnonzero(targets == label)
        turn[members] = np.arange(len(members))
    return images.take(np.lexsort((targets, turn))[:limit].tolist())


def digits(name: str, root: str | None) -> Source:
    """Opens scikit-learn's digits: 1,437 images and 360 held out."""
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


def cifar(name: str, root: str | None) -> Source:
    """Opens CIFAR by torchvision, which checks each file's MD5 before unpickling it."""
    kind: Any = {"cifar10": CIFAR10, "cifar100": CIFAR100}[name]
    place = Path(str(root))
    if os.path.lexists(place / kind.base_folder / STAND_INS):
        train, held_out = (ArrayImages(*half) for half in cifar_stand_ins(name))
        return Source(train, held_out, [f"stand-in {label}" for label in sorted({*train.targets})])
    with suppress(OSError, RuntimeError):  # missing or damaged
        return _read_cifar(kind, place)
    try:
        return _download_cifar(kind, place)
    except (OSError, RuntimeError, ValueError, tarfile.TarError) as error:
        raise UserError(
            f"dataset.root={root}: {name} is missing and could not be downloaded "
            f"({first_line(error)}); put {kind.url} (MD5 {kind.tgz_md5}, not unpacked) into "
            f"{place.absolute()}"
        ) from error


def _read_cifar(kind: Any, place: Path) -> Source:
    """Reads CIFAR. Raises RuntimeError or OSError if a file is missing or damaged."""
    with warnings.catch_warnings(action="ignore"):  # numpy's, about pickles of old versions
        halves = [kind(place, train=is_train) for is_train in (True, False)]
    train, held_out = (ArrayImages(half.data, half.targets) for half in halves)
    return Source(train, held_out, halves[0].classes)


def _download_cifar(kind: Any, place: Path) -> Source:
    """Downloads and unpacks the archive in one process, while others wait."""
    place.mkdir(parents=True, exist_ok=True)
    with FileLock(place / f".{kind.filename}.lock"):
        with suppress(OSError, RuntimeError):
            return _read_cifar(kind, place)
        timeout = socket.getdefaulttimeout()
        socket.setdefaulttimeout(DOWNLOAD_TIMEOUT)
        try:
            download_and_extract_archive(kind.url, place, filename=kind.filename, md5=kind.tgz_md5)
        finally:
            socket.setdefaulttimeout(timeout)
        return _read_cifar(kind, place)


def folders(name: str, root: str | None) -> Source:
    """Opens a folder of image files; UserError if a part of it is not readable."""
    splits = split_folders(name, str(root))
    assert splits is not None, "checked by parse()"
    classes = class_names(splits.train)
    others, parts = Counter[str](), []
    as_seen = name == "image_folder"  # ImageNet's published results show images as stored
    try:
        for folder in filter(None, splits[:3]):
            samples, more = _samples(folder, classes)
            parts.append(FileImages(samples, as_seen))
            others += more
    except OSError as error:
        raise UserError(f"dataset.root={root}: {error}") from error
    validation = parts[2] if splits.validation else None
    return Source(parts[0], parts[1], classes, others, validation, splits.unread)


def unlabelled(folder: Path, classes: list[str]) -> Source:
    """Opens all images below a folder, however deep, as held-out images of the first class.

    Broken ones are left out. Raises UserError as image_files, or if there are none.
    """
    try:
        files, others = image_files(folder)
    except OSError as error:
        raise UserError(f"images={folder}: {error}") from error
    if not files:
        raise UserError(f"images={folder}: holds no images ({', '.join(EXTENSIONS)})")
    images = SkippedFiles([(file, 0) for file in files], as_seen=True)
    return Source(images, images, classes, others)


def _samples(folder: Path, classes: list[str]) -> tuple[list[tuple[str, int]], Counter[str]]:
    """Returns image files with their classes, and the number of other files by their ending.

    Raises OSError as image_files, or for an empty class.
    """
    samples, others = [], Counter[str]()
    for label, name in enumerate(classes):
        files, more = image_files(folder / name)
        if not files:
            raise FileNotFoundError(f"{folder / name} holds no images ({', '.join(EXTENSIONS)})")
        samples += [(file, label) for file in files]
        others += more
    return samples, others
