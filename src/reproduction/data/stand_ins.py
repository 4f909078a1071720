"""Images made on the spot in the data sets' own formats, to try out whole studies offline."""

import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from reproduction.data.folders import IMAGENET_CLASSES
from reproduction.errors import first_line

DIGESTS = "stand_ins.yaml"  # file -> MD5, where CIFAR has published ones
NOISE = 60  # of 256 grey levels; the rest of a pixel tells the class
FOLDER_CLASSES = 10
Pixels = np.ndarray


def make_stand_ins(name: str, root: Path) -> None:
    """Writes stand-ins for the data set `name` into `root`, unless they are there.

    CIFAR: 32 x 32 pixels, 10 training and 5 held-out images a class of CIFAR-10, 2 and 1 of
    CIFAR-100. Folders: 32 x 32 pixels, one training and one held-out image for each of ImageNet's
    1,000 classes, 8 and 4 for each of 10 classes of an image folder. Always the same images.
    """
    if root.exists():
        return
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{name}-") as temporary:
        whole = Path(temporary, name)
        _WRITERS[name](whole)
        try:
            os.rename(whole, root)
        except OSError:
            if not root.is_dir():  # else another process was faster
                raise


def own_digests(folder: Path) -> dict[str, str] | None:
    """The MD5 of each file in a CIFAR folder of stand-ins; None for the real data set.

    OSError or ValueError if they cannot be read.
    """
    path = folder / DIGESTS
    if not os.path.lexists(path):
        return None
    try:
        digests = yaml.safe_load(path.read_text()) if path.is_file() else None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path}: {first_line(error)}") from error
    if not isinstance(digests, dict):
        raise ValueError(f"{path}: holds no digests")
    return digests


def _cifar10(root: Path) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for seed, name in enumerate(names):
        labels = list(range(10)) * (5 if name == "test_batch" else 2)
        content = {"batch_label": name, "labels": labels, "data": _rows(labels, 10, seed)}
        _write(folder / name, content)
    label_names = [f"stand-in {label}" for label in range(10)]
    _write(folder / "batches.meta", {"label_names": label_names, "num_vis": 3072})
    _write_digests(folder)


def _cifar100(root: Path) -> None:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for seed, (name, each) in enumerate({"train": 2, "test": 1}.items()):
        labels = list(range(100)) * each
        coarse = [label // 5 for label in labels]
        content = {"batch_label": name, "fine_labels": labels, "coarse_labels": coarse}
        _write(folder / name, {**content, "data": _rows(labels, 100, seed)})
    fine, coarse_names = ([f"stand-in {i}" for i in range(n)] for n in (100, 20))
    _write(folder / "meta", {"fine_label_names": fine, "coarse_label_names": coarse_names})
    _write_digests(folder)


def _imagenet(root: Path) -> None:
    classes = [f"n{label:08d}" for label in range(IMAGENET_CLASSES)]
    _write_folders(root, classes, train=1, held_out=1)


def _image_folder(root: Path) -> None:
    _write_folders(root, [f"class_{label}" for label in range(FOLDER_CLASSES)], 8, 4)


def _write_folders(root: Path, classes: list[str], train: int, held_out: int) -> None:
    for seed, (split, each) in enumerate({"train": train, "val": held_out}.items()):
        for label, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i, row in enumerate(_rows([label] * each, len(classes), 2 * label + seed)):
                pixels = row.reshape(3, 32, 32).transpose(1, 2, 0)
                Image.fromarray(pixels).save(folder / f"{name}_{i}.JPEG")


def _rows(labels: list[int], classes: int, seed: int) -> Pixels:
    """Noise around a colour of the class's own: `n 3072` uint8, channels first as CIFAR has it."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, NOISE, (len(labels), 3, 1024))
    position = np.asarray(labels)[:, None] * np.array([1, 7, 31])  # differs in each channel
    colour = (position % classes) * (255 - NOISE) // max(1, classes - 1)
    return (noise + colour[:, :, None]).astype(np.uint8).reshape(len(labels), 3072)


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))


def _write_digests(folder: Path) -> None:
    digests = {
        path.name: hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
        for path in folder.iterdir()
    }
    (folder / DIGESTS).write_text(yaml.safe_dump(digests))


_WRITERS: dict[str, Callable[[Path], None]] = {
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "imagenet1k": _imagenet,
    "image_folder": _image_folder,
}
