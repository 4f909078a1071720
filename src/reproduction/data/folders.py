"""Where the images of a data set lie on disk. Imports nothing heavy, so a check costs nothing."""

import os
from pathlib import Path
from typing import NamedTuple, NoReturn

from reproduction.system.errors import UserError

IMAGE_FOLDERS = ("imagenet1k", "image_folder")  # data sets that are folders of image files
EVALUATION_FOLDERS = ("val", "test")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
IMAGENET_CLASSES = 1000


class Sizes(NamedTuple):
    """Images to train on, images held out, classes."""

    train: int
    held_out: int
    classes: int


SIZES = {
    "digits": Sizes(1_437, 360, 10),
    "cifar10": Sizes(50_000, 10_000, 10),
    "cifar100": Sizes(50_000, 10_000, 100),
    "imagenet1k": Sizes(1_281_167, 50_000, IMAGENET_CLASSES),
}


def data_sizes(name: str, root: str | None) -> Sizes:
    """Of a whole data set; only those of an image folder are looked at.

    Raises UserError if that is not there.
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
    """What keeps a data set from being read, in one line that names the key; None if nothing."""
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
            "is in one of them only"
        )
    if odd := [label for label in sorted(train) if not is_text(label)]:
        return f"{folders[0].name}/ must hold classes with names in UTF-8, {odd[0]!r} is none"
    if name == "imagenet1k" and len(train) != IMAGENET_CLASSES:
        return (
            f"imagenet1k needs {IMAGENET_CLASSES} classes, found {len(train)}; for other folders "
            "use dataset=image_folder"
        )
    return None


def split_folders(root: str) -> tuple[Path, Path] | None:
    """The folders of training and held-out images, each with at least one class."""
    train = Path(root, "train")
    for name in EVALUATION_FOLDERS:
        held_out = Path(root, name)
        if class_names(train) and class_names(held_out):
            return train, held_out
    return None


def class_names(folder: Path) -> list[str]:
    """The sub-folders in alphabetical order: class i is name i. OSError if it is not readable."""
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in os.scandir(folder) if os.path.isdir(entry))


def image_files(folder: Path) -> list[str]:
    """The files that are named like images in a folder and below it, in torchvision's order.

    Links are followed. OSError if a folder is not readable, or found twice, as through a link that
    leads up: its images would count as often, or for ever.
    """
    found, seen = [], set()
    for here, _, names in os.walk(folder, onerror=_refuse, followlinks=True):
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in seen:
            raise OSError(f"{here} leads to a folder of images that is in this class already")
        seen.add((status.st_dev, status.st_ino))
        found += [(here, name) for name in names if name.lower().endswith(EXTENSIONS)]
    return [os.path.join(*place) for place in sorted(found)]


def _refuse(error: OSError) -> NoReturn:
    raise error


def is_text(name: str) -> bool:
    """Whether a name on disk is UTF-8: Python stands in for its other bytes."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
