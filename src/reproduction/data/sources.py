"""The data sets: `dataset.source` names the function that opens one, of this module or your own.

A function returns training images, held-out images and perhaps images for validation, in this
order, from `dataset.root` and `dataset.options`. Each has `len`, and item i is an image (PIL or a
uint8 array) with its class (a name or an integer), as in torchvision. If it has `targets`, no image
is read for its class, and if it has `classes`, these are the names of integers.
"""

import os
import warnings
from collections import Counter
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from torchvision.datasets import CIFAR10, CIFAR100, ImageFolder

from reproduction.config import DATA, Dataset
from reproduction.data.halves import Data, Half, Items
from reproduction.data.images import ENDINGS, is_hidden, read
from reproduction.errors import UserError, first_line
from reproduction.function_keys import Refused

HELD_OUT_DIGITS = 360  # of 1,797, stratified

Class = str | int | float | bool  # as a data set names it


# --- opening a data set -------------------------------------------------------------------------


def opened(dataset: Dataset) -> Data:
    """Opens a data set, downloading CIFAR on first use; UserError for whatever fails.

    Keeps `limit` and `eval_limit` images, and sets a part of those for training apart, whose size
    is the ratio `validation`, stratified by class.
    """
    data = _call_source(Asked.of(dataset))
    data = data._replace(
        train=_limited("limit", data.train, dataset.limit),
        held_out=_limited("eval_limit", data.held_out, dataset.eval_limit),
    )
    if dataset.validation:
        data = _with_validation(data, dataset.validation, dataset.validation_seed)
    return data


@dataclass(frozen=True)
class Asked:
    """What decides which images a function returns."""

    source: str
    root: str | None
    written: str  # the options as a text: Python counts 1 and True as equal
    options: dict[str, Any] = field(compare=False)

    @classmethod
    def of(cls, dataset: Dataset) -> "Asked":
        options = deepcopy(dataset.options)  # which the function may change
        return cls(dataset.source, dataset.root, repr(options), options)

    @property
    def override(self) -> str:
        """What is probably wrong, if anything is; of code from elsewhere, its path."""
        if DATA.is_own(self.source):
            return DATA.override(self.source)
        return f"dataset.root={self.root or 'null'}"


@lru_cache(maxsize=1)
def _call_source(asked: Asked) -> Data:
    """Calls the function of a data set; the last result is for all runs of a sweep."""
    options = asked.options
    if asked.root is not None:
        options = {**options, "root": asked.root}
    with DATA.refusing(asked.source, asked.override):
        return _labelled(list(DATA.factory(asked.source)(**options)))


def _labelled(parts: list[Items]) -> Data:
    """Gives the images of each part the indices of the training images' classes."""
    if len(parts) not in (2, 3):
        raise Refused(f"{len(parts)} parts, allowed are 2 and, with images for validation, 3")
    labels = [_labels(part) for part in parts]
    classes = getattr(parts[0], "classes", None) or sorted(set(labels[0]))
    index = {name: i for i, name in enumerate(classes)}
    if len(index) < len(classes):
        twice = next(name for name, count in Counter(classes).items() if count > 1)
        raise Refused(f"two classes are named {twice!r}")
    halves = list[Half]()
    for part, names in zip(parts, labels, strict=True):
        unknown = set(names) - set(index)
        if unknown:
            raise Refused(f"held-out images are of class {min(unknown)!r}, no training image is")
        targets = [index[name] for name in names]
        halves.append(Half.of(part, targets))
    data = Data(halves[0], halves[1], [str(name) for name in classes])
    if len(halves) == 3:
        data = data._replace(validation=halves[2])
    return data


def _labels(part: Items) -> list[Class]:
    """The name of each image's class, or its number if `part` does not name its classes.

    Raises Refused for a label that is none, such as the -1 of a test set whose labels are hidden.
    """
    targets = getattr(part, "targets", None)
    if targets is None:
        targets = [part[i][1] for i in range(len(part))]
    labels = [np.asarray(target).item() for target in targets]  # also [3], as medmnist has them
    if len(labels) != len(part) or not labels:
        raise Refused(f"{len(part)} images, {len(labels)} classes")
    names = getattr(part, "classes", None)
    for i, label in enumerate(labels):
        if names is not None and not (isinstance(label, int) and 0 <= label < len(names)):
            raise Refused(f"image {i} is of class {label!r}, allowed is 0..{len(names) - 1}")
    if names is None:
        return labels
    return [names[label] for label in labels]


def _limited(key: str, half: Half, limit: int | None) -> Half:
    """Returns the first `limit` images in round-robin order of classes, so they stay balanced."""
    if limit is None:
        return half
    targets = np.asarray(half.targets)
    classes = np.unique(targets)
    if not len(classes) <= limit <= len(half):
        raise UserError(f"dataset.{key}={limit}: allowed is {len(classes)}..{len(half)} images")
    seen = Counter[int]()
    turns = []  # how many images of its class are before each
    for target in half.targets:
        turns.append(seen[target])
        seen[target] += 1
    return half.take(np.lexsort((targets, np.asarray(turns)))[:limit].tolist())


def _with_validation(data: Data, ratio: float, seed: int) -> Data:
    """Sets a stratified part of the training images apart, both parts in their order."""
    from sklearn.model_selection import train_test_split  # takes a second to import

    half = data.train
    override = f"dataset.validation={ratio}"
    if data.validation is not None:
        raise UserError(f"{override}: the data set has images for validation, allowed is 0")
    try:
        kept, apart = train_test_split(
            np.arange(len(half)), test_size=ratio, stratify=half.targets, random_state=seed
        )
    except ValueError as error:
        raise UserError(f"{override}: {error}") from error
    train = half.take(sorted(kept.tolist()))
    validation = half.take(sorted(apart.tolist()))
    return data._replace(train=train, validation=validation)


def record(data: Data, weights: str | None = None) -> dict[str, str]:
    """What a run is trained on: summary.json keeps it, and it is compared before it is reused.

    Counts training, validation and held-out images, with a digest of their `content`, one of the
    pixels of images in memory, and, if a run starts from a file of your own, that of this file.
    """
    halves = [half for half in (data.train, data.validation, data.held_out) if half is not None]
    digest = sha256()
    for half in halves:
        for line in half.content(data.classes):
            digest.update(f"{line}\0".encode(errors="replace"))
    counts = " + ".join(f"{len(half):,}" for half in halves)
    classes = f"{len(data.classes):,} classes"
    facts = {"images": f"{counts} images of {classes}, digest {digest.hexdigest()[:8]}"}
    listed = [half for half in halves if half.is_listed]
    if listed:
        pixels = sha256()
        for half in listed:
            for content in half.pixels():
                pixels.update(content)
        facts["pixels"] = f"pixels with sha256 {pixels.hexdigest()[:8]}"
    if weights is not None:
        of_weights = sha256(Path(weights).read_bytes())
        facts["weights"] = f"model.weights with sha256 {of_weights.hexdigest()[:8]}"
    return facts


# --- the sources --------------------------------------------------------------------------------


class Folder(ImageFolder):
    """Images by class: root/<class>/..., but for what editors and systems hide."""

    def __init__(self, root: Path, as_seen: bool = True, **settings: Any):
        loader = partial(read, as_seen=as_seen)
        super().__init__(root, loader=loader, is_valid_file=self._is_image, **settings)

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        found, _ = super().find_classes(directory)
        names = [name for name in found if not is_hidden(name)]
        return names, {name: i for i, name in enumerate(names)}

    def _is_image(self, path: str) -> bool:
        below = path.removeprefix(str(self.root))
        return path.lower().endswith(ENDINGS) and not is_hidden(below)


class Unlabelled(Folder):
    """All images below a folder, however deep, as if of one class; there may be none."""

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        return [""], {"": 0}


def image_folder(root: str) -> list[Folder]:
    """Opens root/train/<class>/, and val/ or test/ likewise; with both, val/ is for validation.

    A folder valid/ is used as val/ is.
    """
    parts = ["train"]
    parts += [name for name in ("test", "val", "valid") if _holds_classes(Path(root, name))]
    if parts == ["train"]:
        parts.append("val")  # which is then named as missing
    return [Folder(Path(root, part)) for part in parts]


def _holds_classes(folder: Path) -> bool:
    return any(path.is_dir() for path in folder.glob("[!.]*"))


def imagenet1k(root: str) -> list[Folder]:
    """Opens root/train/<wnid>/ and root/val/<wnid>/, as the published accuracies see the files."""
    return [Folder(Path(root, part), as_seen=False) for part in ("train", "val")]


def unlabelled(folder: Path, classes: list[str]) -> Data:
    """Opens all images below a folder as held-out images of the first class; UserError for none."""
    items = Unlabelled(folder, allow_empty=True)
    if not items.targets:
        raise UserError(f"images={folder}: holds no image; allowed are {', '.join(ENDINGS)}")
    half = Half.of(items, items.targets)
    return Data(half, half, classes)


def digits() -> list[Items]:
    """Returns scikit-learn's digits: 1,437 images of 8x8 pixels, and 360 held out."""
    from sklearn.datasets import load_digits  # takes a second to import
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    images = np.round(bunch.images * 255 / 16).astype(np.uint8)  # 16 levels of ink
    parts = train_test_split(
        np.arange(len(images)), test_size=HELD_OUT_DIGITS, stratify=bunch.target, random_state=0
    )
    return [[(images[i], bunch.target[i]) for i in part] for part in parts]


def _cifar(cifar: type[CIFAR10], root: str) -> list[CIFAR10]:
    """Reads CIFAR, or downloads it in one process while others wait."""
    with warnings.catch_warnings(action="ignore"):  # numpy's, about pickles of old versions
        with suppress(OSError, RuntimeError):  # missing or damaged
            return [cifar(root, train=is_train) for is_train in (True, False)]
        try:
            os.makedirs(root, exist_ok=True)
            with FileLock(Path(root, f".{cifar.filename}.lock")):
                return [cifar(root, train=is_train, download=True) for is_train in (True, False)]
        except Exception as error:  # of any library
            raise Refused(f"no download of {cifar.url} ({first_line(error)})") from error


cifar10 = partial(_cifar, CIFAR10)
cifar100 = partial(_cifar, CIFAR100)
