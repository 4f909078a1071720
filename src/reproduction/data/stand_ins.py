"""Synthetic stand-ins for the data sets, to try out studies offline."""

import os
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from reproduction.data.folders import imagenet_synsets

STAND_INS = "stand_ins.yaml"  # marks a CIFAR folder as stand-ins
CIFAR_FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
NOISE = 60  # of 256 grey levels; the remaining range encodes the class
FOLDER_CLASSES = 10


def make_stand_ins(name: str, root: Path) -> None:
    """Writes stand-ins for the data set `name` into `root`, unless it exists.

    All images are deterministic, with 32 x 32 pixels. Training and held-out images per class: 10
    and 5 for CIFAR-10, 2 and 1 for CIFAR-100, 1 and 1 for the 1,000 classes of ImageNet, 8 and 4
    for the 10 classes of an image folder. CIFAR's are generated on reading.
    """
    if root.exists():
        return
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{name}-") as temporary:
        folder = Path(temporary, name)
        match name:
            case "imagenet1k":
                _write_folders(folder, imagenet_synsets(), 1, 1)
            case "image_folder":
                _write_folders(folder, [f"class_{i}" for i in range(FOLDER_CLASSES)], 8, 4)
            case "cifar10" | "cifar100":
                (folder / CIFAR_FOLDERS[name]).mkdir(parents=True)
                note = "Its images are stand-ins, made by cifar_stand_ins.\n"
                (folder / CIFAR_FOLDERS[name] / STAND_INS).write_text(note)
        try:
            os.rename(folder, root)
        except OSError:
            if not root.is_dir():  # otherwise another process was faster
                raise


def cifar_stand_ins(name: str) -> list[tuple[np.ndarray, list[int]]]:
    """Returns training and held-out images, `n 32 32 3` uint8, each with their classes."""
    classes, files = (10, [2] * 5 + [5]) if name == "cifar10" else (100, [2, 1])
    labels = [list(range(classes)) * each for each in files]
    rows = [_rows(some, classes, seed) for seed, some in enumerate(labels)]
    return [
        (
            np.concatenate(rows[half]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1),
            np.concatenate(labels[half]).tolist(),
        )
        for half in (slice(-1), slice(-1, None))
    ]


def _write_folders(root: Path, classes: list[str], train: int, held_out: int) -> None:
    for seed, (split, each) in enumerate({"train": train, "val": held_out}.items()):
        for label, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i, row in enumerate(_rows([label] * each, len(classes), 2 * label + seed)):
                pixels = row.reshape(3, 32, 32).transpose(1, 2, 0)
                Image.fromarray(pixels).save(folder / f"{name}_{i}.JPEG")


def _rows(labels: list[int], classes: int, seed: int) -> np.ndarray:
    """Returns noise around a colour per class: `n 3072` uint8, channels first as in CIFAR."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, NOISE, (len(labels), 3, 1024))
    position = np.asarray(labels)[:, None] * np.array([1, 7, 31])  # differs in each channel
    colour = (position % classes) * (255 - NOISE) // max(1, classes - 1)
    return (noise + colour[:, :, None]).astype(np.uint8).reshape(len(labels), 3072)
