"""The data sets: `dataset.source` names the function that opens one, of this module or your own.

A function returns training images, held-out images and perhaps images for validation, in this
order, from `dataset.root` and `dataset.options`. Each has `len`, and item i is an image (PIL or a
uint8 array) with its class (a name or an integer), as in torchvision. If it has `targets`, no image
is read for its class, and if it has `classes`, these are the names of integers.
"""

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from pkgutil import resolve_name
from traceback import extract_tb
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from filelock import FileLock
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torchvision.datasets import CIFAR10, CIFAR100, DatasetFolder, ImageFolder

from reproduction.config import Dataset
from reproduction.data.images import ENDINGS, NO_IMAGE, is_hidden, read, rgb, size
from reproduction.system import UserError, first_line

HELD_OUT_DIGITS = 360  # of 1,797, stratified
MOST_MEMORY = 2**30  # bytes of decoded images that are kept, of each half
MOST_SIZES = 10**5  # files whose sizes are read; those of ImageNet may take minutes


class Half:
    """Images at `places` of `items`: `half[i]` is an RGB image and the index of its class."""

    def __init__(self, items: Any, targets: Sequence[int], places: Sequence[int] | None = None):
        self.items, self.targets = items, [*targets]
        self.places = range(len(self.targets)) if places is None else places
        self.has_files = isinstance(items, DatasetFolder)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        try:
            return rgb(self.items[self.places[index]][0]), self.targets[index]
        except Exception as error:  # from any code
            text = f"dataset.source: image {self.name(index)}: {NO_IMAGE}: {first_line(error)}"
            raise RuntimeError(str(error) if NO_IMAGE in str(error) else text) from error

    def name(self, index: int) -> str:
        """The path of an image, or its place in the data set."""
        place = self.places[index]
        return str(self.items.samples[place][0] if self.has_files else place)

    def take(self, indices: Sequence[int]) -> "Half":
        targets, places = ([part[i] for i in indices] for part in (self.targets, self.places))
        return Half(self.items, targets, places)

    def content(self, classes: list[str]) -> list[str]:
        """What tells images from others: names and sizes of files, else their classes."""
        if not self.has_files:
            return [classes[target] for target in self.targets]
        names, root = map(self.name, range(len(self))), str(self.items.root)
        is_read = len(self) <= MOST_SIZES
        sizes = ((is_read and os.path.exists(x) and os.path.getsize(x), x) for x in names)
        return [f"{size} {name.removeprefix(root)}" for size, name in sizes]

    def pixels(self) -> Iterator[bytes]:
        """The images that a function has returned in a list, which lie in memory."""
        for place in self.places if isinstance(self.items, list | tuple) else ():
            image = np.asarray(self.items[place][0])
            yield f"{image.dtype} {image.shape}".encode() + image.tobytes()


class Data(NamedTuple):
    """A data set. `validation` is a part of the training images, or a folder of its own."""

    train: Half
    held_out: Half
    classes: list[str]
    validation: Half | None = None
    remarks: tuple[str, ...] = ()  # what was left out

    @property
    def per_epoch(self) -> Half:
        """The images to evaluate on after an epoch: for validation, else the held-out ones."""
        return self.held_out if self.validation is None else self.validation


def opened(dataset: Dataset) -> Data:
    """Opens a data set, downloading CIFAR on first use; UserError for whatever fails.

    Keeps `limit` and `eval_limit` images, and sets the share `validation` of those for training
    apart, stratified by class.
    """
    data = _whole(dataset.source, dataset.root, json.dumps(dataset.options, sort_keys=True))
    data = data._replace(
        train=_limited("limit", data.train, dataset.limit),
        held_out=_limited("eval_limit", data.held_out, dataset.eval_limit),
    )
    return _split(data, dataset.validation, dataset.validation_seed) if dataset.validation else data


@lru_cache(maxsize=1)
def _whole(source: str, root: str | None, options: str) -> Data:
    """Calls the function of a data set; the last result serves all points of a sweep."""
    arguments = json.loads(options) | ({} if root is None else {"root": root})
    is_own = not source.startswith(f"{__name__}:")
    try:
        parts = [*resolve_name(source)(**arguments)]
        labels = [_labels(part) for part in parts]
        classes = getattr(parts[0], "classes", None) or sorted({*labels[0]})
        index = {name: i for i, name in enumerate(classes)}
        if len(classes) < 2:
            raise ValueError(f"needs two classes or more, all training images are of {classes[0]}")
        if odd := {x for names in labels[1:] for x in names} - {*labels[0]}:
            raise ValueError(f"held-out images are of class {min(odd)!r}, no training image is")
        targets = [[index[label] for label in names] for names in labels]
        train, held_out, *validation = halves = [*map(Half, parts, targets)]
    except Exception as error:  # from any code
        place = extract_tb(error.__traceback__)[-1]
        where = f" ({place.filename}:{place.lineno})" if is_own else ""
        key = f"dataset.root={root or 'null'}" if options == "{}" else f"dataset.options={options}"
        key = f"dataset.source={source}" if is_own else key
        raise UserError(f"{key}: {first_line(error)}{where}") from error
    names = [str(name) for name in classes]
    return Data(train, held_out, names, next(iter(validation), None), (*_remarks(halves, names),))


def _labels(part: Any) -> list[Any]:
    """The name of each image's class, or its number if `part` does not name its classes."""
    targets = getattr(part, "targets", None)
    if targets is None:
        targets = [part[i][1] for i in range(len(part))]
    labels = [np.asarray(target).item() for target in targets]  # also [3], as medmnist has them
    if len(labels) != len(part) or not labels:
        raise ValueError(f"{len(part)} images, {len(labels)} classes")
    names = getattr(part, "classes", None)
    return labels if names is None else [names[label] for label in labels]


def _remarks(halves: list[Half], classes: list[str]) -> Iterator[str]:
    """Says which files of image folders are left out, and if halves hold the same files."""
    folders = [half for half in halves if isinstance(half.items, Folder)]
    if left_out := sum((half.items.left_out for half in folders), Counter[str]()):
        counts = ", ".join(f"{count:,} {kind}" for kind, count in left_out.most_common())
        yield f"files left out: {counts}"
    for half in folders[1:]:
        first = folders[0]
        if len(half) == len(first) and half.content(classes) == first.content(classes):
            yield f"{half.items.root} has files of the names and sizes of {first.items.root}"


def _limited(key: str, half: Half, limit: int | None) -> Half:
    """Returns the first `limit` images in round-robin order of classes, so they stay balanced."""
    if limit is None:
        return half
    targets = np.asarray(half.targets)
    classes = np.unique(targets)
    if not len(classes) <= limit <= len(half):
        raise UserError(f"dataset.{key}={limit}: allowed is {len(classes)}..{len(half)} images")
    turn = pd.Series(targets).groupby(targets).cumcount()
    return half.take(np.lexsort((targets, turn))[:limit].tolist())


def _split(data: Data, share: float, seed: int) -> Data:
    """Sets a stratified share of the training images apart, both parts in their order."""
    half = data.train
    try:
        if data.validation is not None:
            raise ValueError("the data set has images for validation, allowed is 0")
        parts = train_test_split(
            np.arange(len(half)), test_size=share, stratify=half.targets, random_state=seed
        )
        train, validation = (half.take(sorted(x.tolist())) for x in parts)
        if lost := {*half.targets} - {*train.targets}:
            raise ValueError(f"leaves class {data.classes[min(lost)]} no training image")
    except ValueError as error:
        raise UserError(f"dataset.validation={share}: {error}") from error
    return data._replace(train=train, validation=validation)


def cached(half: Half) -> Half:
    """Decodes the files of `half` if they fit into MOST_MEMORY, which forked workers share.

    UserError names a broken file and how many there are.
    """
    room = MOST_MEMORY if half.has_files else 0
    for i in range(len(half)):
        if room <= 0:
            return half
        room -= size(half.name(i))
    images = _read_all(half, np.array)
    if broken := [image for image in images if isinstance(image, RuntimeError)]:
        count = f"{len(broken):,} of {len(half):,} images of this folder are broken"
        raise UserError(f"{broken[0]}; {count}")
    return Half([*zip(images, half.targets, strict=True)], half.targets)


def _read_all(half: Half, keep: Callable[[Image.Image], Any]) -> list[Any]:
    """What to keep of each image, or the RuntimeError that names it if it is broken."""

    def each(index: int) -> Any:
        try:
            return keep(half[index][0])
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(8) as pool:  # decoding releases the GIL
        return [*pool.map(each, range(len(half)))]


def record(data: Data, weights: str | None = None) -> dict[str, str]:
    """What a run is trained on: summary.json keeps it, and it is compared before it is reused.

    Counts training, validation and held-out images, with a digest of their `content`, one of the
    pixels of images in memory, and, if a run starts from a file of your own, that of this file.
    """
    parts = [x for x in (data.train, data.validation, data.held_out) if x is not None]
    digest = sha256()
    for part in parts:
        digest.update("\0".join([*part.content(data.classes), ""]).encode(errors="replace"))
    counts = " + ".join(f"{len(part):,}" for part in parts)
    classes = f"{len(data.classes):,} classes"
    found = {"images": f"{counts} images of {classes}, digest {digest.hexdigest()[:8]}"}
    pixels = sha256()
    for part in parts:
        for image in part.pixels():
            pixels.update(image)
    if pixels.digest() != sha256().digest():
        found["pixels"] = f"pixels with sha256 {pixels.hexdigest()[:8]}"
    if weights is not None:
        digest = sha256(Path(weights).read_bytes())
        found["weights"] = f"model.weights with sha256 {digest.hexdigest()[:8]}"
    return found


class Folder(ImageFolder):
    """Images by class: root/<class>/..., but for what editors and systems hide.

    `left_out` counts other files by their ending.
    """

    def __init__(self, root: Path, as_seen: bool = True, **settings: Any):
        self.left_out = Counter[str]()
        loader = partial(read, as_seen=as_seen)
        super().__init__(root, loader=loader, is_valid_file=self._is_image, **settings)

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        beside = [name for name in os.listdir(directory) if not is_hidden(name)]
        names = sorted(name for name in beside if Path(directory, name).is_dir())
        images = {name for name in beside if name.lower().endswith(ENDINGS)} - {*names}
        if images:
            self.left_out["image beside the class folders"] = len(images)
        return names, {name: i for i, name in enumerate(names)}

    def _is_image(self, path: str) -> bool:
        if is_hidden(path.removeprefix(str(self.root))):
            return False
        ending = os.path.splitext(path)[1].lower()
        if ending not in ENDINGS:
            self.left_out[ending or "without an ending"] += 1
        return ending in ENDINGS


class Unlabelled(Folder):
    """All images below a folder, however deep, as if of one class; there may be none."""

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        return [""], {"": 0}


def image_folder(root: str) -> list[Folder]:
    """Opens root/train/<class>/, and val/ or test/ likewise; with both, val/ is for validation."""
    found = [x for x in ("test", "val") if any(y.is_dir() for y in Path(root, x).glob("[!.]*"))]
    held_out, *validation = found or ["val"]
    return [Folder(Path(root, part)) for part in ("train", held_out, *validation)]


def imagenet1k(root: str) -> list[Folder]:
    """Opens root/train/<wnid>/ and root/val/<wnid>/, as the published accuracies see the files."""
    return [Folder(Path(root, part), as_seen=False) for part in ("train", "val")]


def unlabelled(folder: Path, classes: list[str]) -> Data:
    """Opens all images below a folder as held-out images of the first class.

    Remarks name the broken ones, which are left out. UserError if there is no other.
    """
    items = Unlabelled(folder, allow_empty=True)
    half = Half(items, items.targets)
    problems = _read_all(half, lambda image: None)
    broken = [f"left out: {x}" for x in problems if x is not None]
    if len(broken) == len(half):
        raise UserError(f"images={folder}: {'; '.join([NO_IMAGE, *broken[:1]])}")
    half = half.take([i for i, problem in enumerate(problems) if problem is None])
    return Data(half, half, classes, remarks=(*_remarks([half], classes), *broken))


def digits() -> list[Any]:
    """Returns scikit-learn's digits: 1,437 images of 8x8 pixels, and 360 held out."""
    bunch = load_digits()
    images = np.round(bunch.images * 255 / 16).astype(np.uint8)  # 16 levels of ink
    parts = train_test_split(
        np.arange(len(images)), test_size=HELD_OUT_DIGITS, stratify=bunch.target, random_state=0
    )
    return [[(images[i], bunch.target[i]) for i in part] for part in parts]


def _cifar(kind: Any, root: str) -> list[Any]:
    """Reads CIFAR, or downloads it in one process while others wait."""
    with warnings.catch_warnings(action="ignore"):  # numpy's, about pickles of old versions
        with suppress(OSError, RuntimeError):  # missing or damaged
            return [kind(root, train=is_train) for is_train in (True, False)]
        try:
            os.makedirs(root, exist_ok=True)
            with FileLock(Path(root, f".{kind.filename}.lock")):
                return [kind(root, train=is_train, download=True) for is_train in (True, False)]
        except Exception as error:  # of any library
            put = f"put {kind.url} (MD5 {kind.tgz_md5}, not unpacked) into {os.path.abspath(root)}"
            raise OSError(f"no download ({first_line(error)}); {put}") from error


cifar10, cifar100 = partial(_cifar, CIFAR10), partial(_cifar, CIFAR100)
