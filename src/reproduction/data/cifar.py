"""CIFAR-10 and CIFAR-100, read from their pickled files without running what is in them."""

import hashlib
import io
import pickle
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torchvision.datasets import CIFAR10, CIFAR100

from reproduction.data.archives import Digests, fetch, is_whole
from reproduction.data.folders import SIZES
from reproduction.data.stand_ins import own_digests
from reproduction.errors import UserError, first_line

KINDS = {"cifar10": CIFAR10, "cifar100": CIFAR100}  # know the names and digests of the files
LABELS = {"cifar10": "labels", "cifar100": "fine_labels"}
SHAPE = (3, 32, 32)
# All that pickled arrays ask for, of numpy 1 and 2; the last is how Python 3 writes bytes.
KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class Split(NamedTuple):
    """Images, `n 32 32 3` uint8, and their classes."""

    images: np.ndarray
    targets: list[int]


def read_cifar(name: str, root: str) -> tuple[Split, Split, list[str]]:
    """(training, held-out, names of the classes), downloaded on first use.

    UserError if the download fails, or if a folder of stand-ins holds anything else.
    """
    kind: Any = KINDS[name]
    place = Path(root).expanduser()
    folder = place / kind.base_folder
    try:
        digests = own_digests(folder)
        if digests is not None:
            return _read(name, kind, folder, digests)
    except (OSError, ValueError) as error:
        reason = f"its stand-in images are broken ({error}), remove the folder"
        raise UserError(f"dataset.root={root}: {reason}") from error
    digests = dict([*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])])
    try:
        if not is_whole(folder, digests):
            fetch(place / kind.filename, kind.tgz_md5, kind.url, folder, digests)
        return _read(name, kind, folder, digests)
    except (OSError, RuntimeError, ValueError, KeyError, tarfile.TarError) as error:
        raise UserError(
            f"dataset.root={root}: {name} is not there and could not be downloaded "
            f"({first_line(error)}); put {kind.url} (MD5 {kind.tgz_md5}, not unpacked) into "
            f"{place.absolute()}"
        ) from error


def _read(name: str, kind: Any, folder: Path, digests: Digests) -> tuple[Split, Split, list[str]]:
    """Reads files by torchvision's lists of them; OSError or ValueError names a broken one."""
    meta = kind.meta["filename"]
    classes: Any = _unpickled(folder, meta, digests).get(kind.meta["key"])
    count = SIZES[name].classes
    if not _is_list_of(str, classes) or len(classes) != count:
        raise ValueError(f"{folder / meta}: {kind.meta['key']} are no {count} names")
    train, held_out = (
        _joined([_batch(folder, file, digests, LABELS[name], count) for file, _ in files])
        for files in (kind.train_list, kind.test_list)
    )
    return train, held_out, classes


def _joined(batches: list[Split]) -> Split:
    images = np.concatenate([batch.images for batch in batches])
    return Split(images, [target for batch in batches for target in batch.targets])


def _batch(folder: Path, file: str, digests: Digests, key: str, classes: int) -> Split:
    entry = _unpickled(folder, file, digests)
    labels: Any = entry.get(key)
    try:
        pixels = entry["data"].array().reshape(-1, *SHAPE)
    except Exception as error:  # of parts of any kind
        raise ValueError(f"{folder / file}: data are no images of 3 x 32 x 32 bytes") from error
    if not _is_list_of(int, labels) or len(labels) != len(pixels) or not labels:
        raise ValueError(f"{folder / file}: {key} are no class for each of {len(pixels)} images")
    if min(labels) < 0 or max(labels) >= classes:
        raise ValueError(f"{folder / file}: {key} are no classes 0..{classes - 1}")
    return Split(pixels.transpose(0, 2, 3, 1), labels)


def _is_list_of(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _unpickled(folder: Path, file: str, digests: Digests) -> dict[str, Any]:
    """What the file holds; OSError or ValueError names it if it is another or broken."""
    path = folder / file
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    content = path.read_bytes()
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != digests.get(file):
        raise ValueError(f"{path}: has not the MD5 that it should")
    try:
        held = _Unpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a broken pickle can raise any
        raise ValueError(f"{path}: {first_line(error)}") from error
    if not isinstance(held, dict):
        raise ValueError(f"{path}: holds no batch of images")
    return held


class _Part:
    """A part of a pickled array: keeps what it was made of, and does nothing with it."""

    state: Any = None

    def __init__(self, *made_of: Any):
        self.made_of = made_of

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        """The array of bytes that this is; any Exception if it is none."""
        _, shape, dtype, is_fortran, raw = self.state
        if dtype.made_of[0] != "u1":
            raise ValueError("no bytes")
        if isinstance(raw, _Part):
            raw = raw.made_of[0]
        content = raw.encode("latin1") if isinstance(raw, str) else raw
        return np.frombuffer(content, np.uint8).reshape(shape, order="F" if is_fortran else "C")


class _Unpickler(pickle._Unpickler):
    """Imports and calls nothing. The one in C would take any memory that a file asks for."""

    def find_class(self, module: str, name: str) -> type[_Part]:
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"asks for {module}.{name}, which is no part of an image")
        return _Part
