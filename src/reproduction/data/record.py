"""What lay behind the paths of a run: kept when it starts, compared when it is used again."""

import hashlib
import os
from functools import lru_cache
from pathlib import Path

from reproduction.config import Config, Dataset
from reproduction.data.images import FileImages
from reproduction.data.sources import open_source


def record_of(config: Config, with_images: bool = True) -> dict[str, str]:
    """Describes the images and, if they are from a file of your own, the initial weights."""
    record, weights = {}, config.model.weights
    if with_images:
        record["images"] = _images(config.dataset)
    if weights is not None:
        digest = _sha256(weights, os.stat(weights).st_mtime_ns)
        record["weights"] = f"model.weights with sha256 {digest}"
    return record


def _images(dataset: Dataset) -> str:
    """Counts training, validation (of a folder of its own) and held-out images, before any limit.

    With a digest of an image folder's names and sizes, or of the classes of a function's images.
    ImageNet has none: the sizes of a million files may take minutes to read.
    """
    source = open_source(dataset)
    parts = [x for x in (source.train, source.validation, source.held_out) if x is not None]
    counts = " + ".join(f"{len(part):,}" for part in parts)
    text = f"{counts} images of {len(source.classes):,} classes"
    if dataset.name == "image_folder":
        digests = [_names_and_sizes(part, str(Path(str(dataset.root)))) for part in parts]
        text += f", names and sizes {_digest(*digests)}"
    if dataset.name == "custom":
        text += f", order {_digest(*(str(part.targets) for part in parts))}"
    return text


@lru_cache(maxsize=3)
def _names_and_sizes(images: FileImages, root: str) -> str:
    digest = hashlib.sha256()
    for name, _ in images.samples():
        try:
            size = os.stat(name).st_size
        except OSError:  # as of a link that leads nowhere, which is reported on reading
            size = -1
        digest.update(os.fsencode(f"{size} {name.removeprefix(root).lstrip('/')}\0"))
    return digest.hexdigest()[:8]


def _digest(*texts: str) -> str:
    return hashlib.sha256(os.fsencode("\0".join(texts))).hexdigest()[:8]


@lru_cache
def _sha256(path: str, changed: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:8]
