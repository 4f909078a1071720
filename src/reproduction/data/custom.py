"""Own data: `dataset.source` names a function that returns training and held-out images.

Both are sequences of (image, class). An image is a PIL image or a uint8 array, `h w` if grey, else
`h w 3`; a class is an integer or a name. The class names are those of the training images, sorted.
"""

import hashlib
import importlib
import json
import pkgutil
from collections.abc import Mapping, Sequence
from functools import lru_cache
from traceback import extract_tb
from typing import Any, NamedTuple, Self

import numpy as np
from PIL import Image

from reproduction.data.images import CHANNELS, NO_IMAGE, OWN, to_rgb
from reproduction.system.errors import UserError, first_line

# Files whose lines in a traceback tell nothing
NOT_OWN = (__file__, pkgutil.__file__, importlib.__file__, "<frozen importlib._bootstrap>")
Pairs = Sequence[tuple[Any, Any]]  # `len` and integer indices are enough


class OwnImages:
    """The images at `places` of a sequence of pairs, read on access."""

    def __init__(self, pairs: Pairs, targets: list[int], places: Sequence[int]):
        self.pairs, self.targets, self.places = pairs, targets, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        place = self.places[index]
        try:
            return _rgb(self.pairs[place][0]), self.targets[index]
        except Exception as error:  # from any code
            raise RuntimeError(f"{OWN} {place}: {NO_IMAGE}: {first_line(error)}") from error

    def name(self, index: int) -> str:
        return str(self.places[index])

    def take(self, indices: list[int]) -> Self:
        targets, places = ([part[i] for i in indices] for part in (self.targets, self.places))
        return type(self)(self.pairs, targets, places)


def _rgb(image: Any) -> Image.Image:
    """Converts a PIL image or a uint8 array; TypeError or ValueError for anything else."""
    if isinstance(image, np.ndarray) and image.dtype == np.uint8:
        if image.ndim != 2 and image.shape[2:] != (CHANNELS,):
            raise TypeError(f"must be an array h w or h w 3, has the shape {image.shape}")
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image):
        kind = getattr(image, "dtype", None) or type(image).__name__
        raise TypeError(f"must be a PIL image or an array of 8 bits a channel, is {kind}")
    return to_rgb(image, upright=False)


class OwnData(NamedTuple):
    """What the function returned, with class indices."""

    train: OwnImages
    held_out: OwnImages
    classes: list[str]

    @property
    def content(self) -> str:
        """Identifies the data by their length and classes, see `dataset.content`."""
        digest = hashlib.sha256(json.dumps(self.classes).encode()).hexdigest()[:8]
        lengths = f"{len(self.train)} + {len(self.held_out)} images"
        return f"{lengths} of {len(self.classes)} classes {digest}"


def load(source: str, options: Mapping[str, Any]) -> OwnData:
    """Imports and calls the function `package.module:name`; the last result is kept.

    Raises UserError for whatever goes wrong in it, and if it returns no usable images.
    """
    return _load(source, json.dumps(options, sort_keys=True))


@lru_cache(maxsize=1)
def _load(source: str, options: str) -> OwnData:
    halves = _call(source, json.loads(options))
    try:
        if not isinstance(halves, tuple | list) or len(halves) != 2:
            raise TypeError(f"two sequences, not one {type(halves).__name__}")
        train, held_out = halves
        labels = [_labels(half) for half in (train, held_out)]
    except Exception as error:  # from any code
        reason = f"must return training and held-out images as pairs (image, class): {error}"
        raise UserError(f"dataset.source={source}: {reason}") from error
    classes = _sorted_classes(source, *labels)
    index = {name: i for i, name in enumerate(classes)}
    images = [
        OwnImages(half, [index[name] for name in names], range(len(names)))
        for half, names in zip((train, held_out), labels, strict=True)
    ]
    return OwnData(images[0], images[1], [str(name) for name in classes])


def _call(source: str, options: dict[str, Any]) -> Any:
    try:
        return pkgutil.resolve_name(source)(**options)
    except Exception as error:  # from any code
        reason = first_line(error)
        if isinstance(error, ModuleNotFoundError):
            reason += "; modules must lie beside the script or in PYTHONPATH"
        elif frames := [x for x in extract_tb(error.__traceback__) if x.filename not in NOT_OWN]:
            reason += f" ({frames[-1].filename}:{frames[-1].lineno})"
        raise UserError(f"dataset.source={source}: {reason}") from error


def _labels(pairs: Any) -> list[int | str]:
    """The class of each image: `targets`, as torchvision's data sets have them, or of its pair."""
    targets = getattr(pairs, "targets", None)
    if targets is None:
        targets = [pairs[i][1] for i in range(len(pairs))]
    labels = [np.asarray(target).item() for target in targets]  # also [3], as medmnist has them
    if len(labels) != len(pairs) or not labels:
        raise ValueError(f"{len(pairs)} images, {len(labels)} classes")
    if odd := [label for label in labels if type(label) not in (int, str)]:
        raise ValueError(f"a class must be an integer or a name, not {odd[0]!r}")
    return labels


def _sorted_classes(
    source: str, train: list[int | str], held_out: list[int | str]
) -> list[int | str]:
    """Returns the classes of the training images in order; UserError unless they fit."""
    classes = {*train}
    reason = None
    if len({type(name) for name in classes}) > 1:
        reason = "classes must be all integers or all names"
    elif len(classes) < 2:
        reason = f"needs two classes or more, all training images are of {train[0]!r}"
    elif odd := {*held_out} - classes:
        reason = f"held-out images are of class {min(map(repr, odd))}, no training image is"
    if reason is not None:
        raise UserError(f"dataset.source={source}: {reason}")
    return sorted(classes, key=lambda name: name)
