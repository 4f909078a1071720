"""The layout of data sets on disk. Imports no heavy package, so that checks are fast."""

import os
from functools import cache
from pathlib import Path
from typing import NamedTuple, NoReturn

from reproduction.system.errors import UserError

IMAGE_FOLDERS = ("imagenet1k", "image_folder")  # stored as folders of image files
EVALUATION_FOLDERS = ("val", "test")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
IMAGENET_CLASSES = 1000


class Sizes(NamedTuple):
    """Numbers of training images, held-out images and classes."""

    train: int
    held_out: int
    classes: int


SIZES = {
    "digits": Sizes(1_437, 360, 10),
    "cifar10": Sizes(50_000, 10_000, 10),
    "cifar100": Sizes(50_000, 10_000, 100),
    "imagenet1k": Sizes(1_281_167, 50_000, IMAGENET_CLASSES),
}


@cache
def data_sizes(name: str, root: str | None) -> Sizes:
    """Returns the sizes of a data set. Counts the files of an image folder, once in a process.

    Raises UserError if the image folder is missing or invalid.
    """
    if name in SIZES:
        return SIZES[name]
    if problem := missing_data(name, root):
        raise UserError(problem)
    folders = split_folders(str(root))
    assert folders is not None
    classes = class_names(folders[0])
    try:
        train, held_out = (
            sum(len(image_files(folder / name)) for name in classes) for folder in folders
        )
    except OSError as error:
        raise UserError(f"dataset.root={root}: {error}") from error
    return Sizes(train, held_out, len(classes))


def missing_data(name: str, root: str | None) -> str | None:
    """Returns why a data set cannot be read, in one line that names the key, or None."""
    if name == "digits":
        return None if root is None else f"dataset.root={root}: digits needs no folder, use null"
    if root is None:
        return f"dataset.root=null: {name} needs a folder, set dataset.root"
    if name in ("cifar10", "cifar100"):
        return None  # downloaded on first use
    try:
        problem = _folder_problem(name, root)
    except OSError as error:
        problem = str(error)
    return None if problem is None else f"dataset.root={root}: {problem}"


def _folder_problem(name: str, root: str) -> str | None:
    folders = split_folders(root)
    if folders is None:
        held_out = " or ".join(f"{folder}/<class>/" for folder in EVALUATION_FOLDERS)
        return f"{name} needs this folder with train/<class>/ and {held_out} in it"
    train, held_out_classes = (set(class_names(folder)) for folder in folders)
    if odd := sorted(train ^ held_out_classes):
        return (
            f"{folders[0].name}/ and {folders[1].name}/ must hold the same classes, {odd[0]!r} "
            "is only in one of them"
        )
    if odd := [label for label in sorted(train) if not is_text(label)]:
        return f"{folders[0].name}/ must hold classes with names in UTF-8, {odd[0]!r} is not"
    if name == "imagenet1k" and len(train) != IMAGENET_CLASSES:
        return (
            f"imagenet1k needs {IMAGENET_CLASSES} classes, found {len(train)}; for other folders "
            "use dataset=image_folder"
        )
    return None


def split_folders(root: str) -> tuple[Path, Path] | None:
    """Returns the training and held-out folders if both have classes, otherwise None."""
    train = Path(root, "train")
    for name in EVALUATION_FOLDERS:
        held_out = Path(root, name)
        if class_names(train) and class_names(held_out):
            return train, held_out
    return None


def class_names(folder: Path) -> list[str]:
    """Returns the sorted sub-folders; class i is name i. Raises OSError if unreadable."""
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in os.scandir(folder) if os.path.isdir(entry))


def image_files(folder: Path) -> list[str]:
    """Returns all image files below a folder, by extension, in torchvision's order.

    Follows links. Raises OSError if a folder is unreadable or reached twice, as through a link to a
    parent, which would count its images repeatedly or without end.
    """
    files, seen = [], set()
    for here, _, names in os.walk(folder, onerror=_raise, followlinks=True):
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in seen:
            raise OSError(f"{here} leads to a folder that this class already contains")
        seen.add((status.st_dev, status.st_ino))
        files += [(here, name) for name in names if name.lower().endswith(EXTENSIONS)]
    return [os.path.join(*parts) for parts in sorted(files)]


def _raise(error: OSError) -> NoReturn:
    raise error


def is_text(name: str) -> bool:
    """Whether a name on disk is valid UTF-8; Python reads other bytes as surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
