"""The data sets and their layout on disk. Imports no heavy package, so that checks are fast."""

import os
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple, NoReturn

from reproduction.system.errors import in_one_line

IMAGE_FOLDERS = ("imagenet1k", "image_folder")  # stored as folders of image files
EXTENSIONS = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".webp", ".avif"),
    *(".ppm", ".bmp", ".pgm", ".tif", ".tiff"),
)
OF_SYSTEMS = ("@eaDir", "__MACOSX", "lost+found", "$RECYCLE.BIN")  # no classes, no images
IMAGENET_CLASSES = 1000
SYNSETS = "timm/data/_info/imagenet_synsets.txt"


class Sizes(NamedTuple):
    """Numbers of training images, held-out images and classes."""

    train: int
    held_out: int
    classes: int


class Splits(NamedTuple):
    """Folders with the same classes. `unread` has others, so it is not the test set."""

    train: Path
    held_out: Path
    validation: Path | None = None
    unread: Path | None = None


class Entry(NamedTuple):
    """Of a data set: the function `module:name` that opens it, and its sizes if they are fixed.

    Without a function, `dataset.source` names it.
    """

    opens: str | None
    sizes: Sizes | None = None


DATASETS = {
    "digits": Entry("reproduction.data.sources:digits", Sizes(1_437, 360, 10)),
    "cifar10": Entry("reproduction.data.sources:cifar", Sizes(50_000, 10_000, 10)),
    "cifar100": Entry("reproduction.data.sources:cifar", Sizes(50_000, 10_000, 100)),
    "imagenet1k": Entry(
        "reproduction.data.sources:folders", Sizes(1_281_167, 50_000, IMAGENET_CLASSES)
    ),
    "image_folder": Entry("reproduction.data.sources:folders"),
    "custom": Entry(None),
}


def missing_data(name: str, root: str | None) -> str | None:
    """Returns why a data set cannot be read, in one line that names the key, or None."""
    if name in ("digits", "custom"):
        return None if root is None else f"dataset.root={root}: {name} needs no folder, use null"
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
    folders = split_folders(name, root)
    if folders is None:
        needed = "train/<class>/ and val/<class>/ or test/<class>/"
        return f"{name} needs this folder with {needed} in it"
    train = {*class_names(folders.train)}
    other = folders.validation or folders.held_out
    if odd := sorted(train ^ {*class_names(other)}):
        same = f"train/ and {other.name}/ must hold the same classes"
        return f"{same}, {odd[0]!r} is only in one of them"
    if odd := [label for label in sorted(train) if not is_text(label)]:
        return f"train/ must hold classes with names in UTF-8, {odd[0]!r} is not"
    synsets = {*imagenet_synsets()} if name == "imagenet1k" else train
    if odd := [*sorted(train - synsets), *sorted(synsets - train)]:
        problem = "is missing" if odd[0] in synsets else "is none of them"
        return (
            f"imagenet1k needs the folders of its {IMAGENET_CLASSES:,} synsets, {odd[0]!r} "
            f"{problem}; for other folders use dataset=image_folder"
        )
    if len(train) == 1:
        return f"{name} needs two classes or more, train/ holds {min(train)!r} alone"
    return None


def imagenet_synsets() -> list[str]:
    """Returns the folders of ImageNet-1K, sorted, from a file of timm; does not import it."""
    return Path(str(distribution("timm").locate_file(SYNSETS))).read_text().split()


def split_folders(name: str, root: str) -> Splits | None:
    """Returns the folders of training and held-out images if both have classes, otherwise None.

    Of an image folder whose test/ has the classes of train/, val/ is the validation split.
    """
    train, val, test = (Path(root, part) for part in ("train", "val", "test"))
    if not class_names(train):
        return None
    if not class_names(val):
        return Splits(train, test) if class_names(test) else None
    if name != "image_folder" or not class_names(test):
        return Splits(train, val)
    if class_names(test) == class_names(train):
        return Splits(train, test, val)
    return Splits(train, val, unread=test)


def class_names(folder: Path) -> list[str]:
    """Returns the sorted sub-folders; class i is name i.

    Raises OSError if it is unreadable, or for a link that leads nowhere, which may be a class.
    """
    if not folder.is_dir():
        return []
    names = sorted(_visible(os.listdir(folder)))
    return [name for name in names if os.path.isdir(_existing(os.path.join(folder, name)))]


def _visible(names: Iterable[str]) -> list[str]:
    """Leaves out what other programs hide, such as .ipynb_checkpoints and the Mac's ._1.jpg."""
    return [name for name in names if not name.startswith(".") and name not in OF_SYSTEMS]


def _existing(path: str) -> str:
    if not os.path.exists(path):
        raise OSError(f"{path} is a link that leads nowhere")
    return path


def image_files(folder: Path) -> tuple[list[str], Counter[str]]:
    """Returns all image files below a folder, by extension, in torchvision's order.

    Also returns the number of other files by their ending. Ignores hidden files and folders, and
    follows links. Raises OSError if a folder is unreadable, if a link that is no image leads
    nowhere, or if a folder is reached twice, as through a link to a parent, which would count its
    images repeatedly or without end.
    """
    files, others, seen = [], Counter[str](), set()
    for here, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in seen:
            raise OSError(f"{here} leads to a folder that this one already contains")
        seen.add((status.st_dev, status.st_ino))
        folders[:] = _visible(folders)
        for name in _visible(names):
            ending = os.path.splitext(name)[1].lower()
            if ending in EXTENSIONS:
                files.append((here, name))
            else:
                _existing(os.path.join(here, name))
                others[in_one_line(ending) or "without one"] += 1
    return [os.path.join(*parts) for parts in sorted(files)], others


def _raise(error: OSError) -> NoReturn:
    raise error


def is_text(name: str) -> bool:
    """Whether a name on disk is valid UTF-8; Python reads other bytes as surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
