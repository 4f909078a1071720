"""Images made on the spot in the data sets' own formats, to try out whole studies offline."""

import hashlib
import os
import pickle
import tempfile
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from reproduction.data.folders import IMAGENET_CLASSES

STAND_INS = "stand_ins.yaml"  # marks a CIFAR folder of them; its MD5s are for people
NOISE = 60  # of 256 grey levels; the rest of a pixel tells the class
FOLDER_CLASSES = 10


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
        match name:
            case "imagenet1k":
                _write_folders(whole, [f"n{i:08d}" for i in range(IMAGENET_CLASSES)], 1, 1)
            case "image_folder":
                _write_folders(whole, [f"class_{i}" for i in range(FOLDER_CLASSES)], 8, 4)
            case "cifar10" | "cifar100":
                _write_cifar(whole, name)
        try:
            os.rename(whole, root)
        except OSError:
            if not root.is_dir():  # else another process was faster
                raise


def cifar_digests(name: str) -> dict[str, str]:
    """The MD5 of each file of a CIFAR's stand-ins, whatever a folder itself says of them."""
    return {
        file: hashlib.md5(content, usedforsecurity=False).hexdigest()
        for file, content in _cifar_files(name).items()
    }


def _write_cifar(root: Path, name: str) -> None:
    folder = root / {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[name]
    folder.mkdir(parents=True)
    for file, content in _cifar_files(name).items():
        (folder / file).write_bytes(content)
    (folder / STAND_INS).write_text(yaml.safe_dump(cifar_digests(name)))


def _cifar_files(name: str) -> dict[str, bytes]:
    """What is in each file, pickled as published."""
    files: dict[str, dict[str, object]] = {}
    if name == "cifar10":
        for seed, file in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
            labels = list(range(10)) * (5 if file == "test_batch" else 2)
            files[file] = {"batch_label": file, "labels": labels, "data": _rows(labels, 10, seed)}
        files["batches.meta"] = {"label_names": _names(10), "num_vis": 3072}
    else:
        for seed, (file, each) in enumerate({"train": 2, "test": 1}.items()):
            labels = list(range(100)) * each
            coarse = [label // 5 for label in labels]
            files[file] = {"batch_label": file, "fine_labels": labels, "coarse_labels": coarse}
            files[file]["data"] = _rows(labels, 100, seed)
        files["meta"] = {"fine_label_names": _names(100), "coarse_label_names": _names(20)}
    return {file: pickle.dumps(content, protocol=2) for file, content in files.items()}


def _names(classes: int) -> list[str]:
    return [f"stand-in {label}" for label in range(classes)]


def _write_folders(root: Path, classes: list[str], train: int, held_out: int) -> None:
    for seed, (split, each) in enumerate({"train": train, "val": held_out}.items()):
        for label, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i, row in enumerate(_rows([label] * each, len(classes), 2 * label + seed)):
                pixels = row.reshape(3, 32, 32).transpose(1, 2, 0)
                Image.fromarray(pixels).save(folder / f"{name}_{i}.JPEG")


def _rows(labels: list[int], classes: int, seed: int) -> np.ndarray:
    """Noise around a colour of the class's own: `n 3072` uint8, channels first as CIFAR has it."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, NOISE, (len(labels), 3, 1024))
    position = np.asarray(labels)[:, None] * np.array([1, 7, 31])  # differs in each channel
    colour = (position % classes) * (255 - NOISE) // max(1, classes - 1)
    return (noise + colour[:, :, None]).astype(np.uint8).reshape(len(labels), 3072)
