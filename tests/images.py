"""Images for tests: folders of them, and own data that disturbs the run that reads it.

    train("dataset=custom", "dataset.source=tests.images:digits", ...)

trains on digits. What happens at an image is told by the environment, not by the command, so that
the command of a disturbed run also resumes it:

    with disturbed("SIGTERM", at=45):   # at the 45th training image that a process reads
        assert train(OWN, "name=mine").status == 130
    assert train(OWN, "name=mine", "resume=auto").status == 0
"""

import hashlib
import os
import pickle
import signal
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

SOURCE = "dataset.source=tests.images:digits"
OWN = ("dataset=custom", SOURCE, "dataset.workers=0")
EVENT = "TESTS_IMAGES_EVENT"
LOG = "TESTS_IMAGES_LOG"
UNREADABLE = "TESTS_IMAGES_UNREADABLE"
read = {"train": 0, "held_out": 0}  # images by this process since the event was chosen


@contextmanager
def disturbed(event: str, at: int, half: str = "train", rank: int = 0) -> Iterator[None]:
    """Lets something happen when a rank reads its `at`-th image, counted from 1, of a half.

    The name of a signal sends it to the rank (which may be SIGKILL), or two names with a plus
    between them; `hang` sends SIGTERM and then waits for a second; `interrupt` raises
    KeyboardInterrupt; `fail` an error; `loss` or `gradient` lets the next one not be finite.
    Contexts within each other let all of it happen.
    """
    read.update(train=0, held_out=0)
    others = os.environ.get(EVENT, "")
    with mock.patch.dict(os.environ, {EVENT: f"{others};{event} {at} {half} {rank}"}):
        yield


@contextmanager
def recorded(path: Path) -> Iterator[None]:
    """Appends `half index rank` to a file for every image that is read."""
    with mock.patch.dict(os.environ, {LOG: str(path.absolute())}):
        yield


class Read(NamedTuple):
    """An image that a run has read."""

    half: str
    index: int
    rank: int


def reads(log: Path) -> list[Read]:
    """What `recorded` has written, in its order."""
    found = []
    for line in log.read_text().splitlines():
        half, index, rank = line.split()
        found.append(Read(half, int(index), int(rank)))
    return found


@contextmanager
def unreadable(*indices: int, half: str = "train") -> Iterator[None]:
    """Lets these images of a half fail as Pillow does on content that it cannot decode."""
    places = [f"{half} {index}" for index in indices]
    with mock.patch.dict(os.environ, {UNREADABLE: ",".join(places)}):
        yield


class Half(Sequence[tuple[np.ndarray, int]]):
    """Half of the data: (image `h w`, class) pairs."""

    def __init__(self, name: str, images: np.ndarray, targets: list[int]):
        self.name = name
        self.images = images
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:  # type: ignore[override]
        _happen(self.name, index)
        if f"{self.name} {index}" in os.environ.get(UNREADABLE, "").split(","):
            raise OSError("image file is truncated")
        return self.images[index], self.targets[index]


def digits(train: int = 60, held_out: int = 30) -> tuple[Half, Half]:
    """The first and the last of scikit-learn's digits."""
    images, targets = _digits()
    first = Half("train", images[:train], targets[:train])
    last = Half("held_out", images[-held_out:], targets[-held_out:])
    return first, last


@cache
def _digits() -> tuple[np.ndarray, list[int]]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = np.round(bunch.images * 255 / 16)
    return pixels.astype(np.uint8), bunch.target.tolist()


def _happen(half: str, index: int) -> None:
    """Records the image, and lets the event happen if it is its turn."""
    rank = 0
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
    if LOG in os.environ:
        with open(os.environ[LOG], "a") as file:
            file.write(f"{half} {index} {rank}\n")
    read[half] += 1
    for planned in os.environ.get(EVENT, "").split(";"):
        event, _, turn = planned.partition(" ")
        if turn == f"{read[half]} {half} {rank}":
            _let_happen(event)


def _let_happen(event: str) -> None:
    if event in ("loss", "gradient"):
        from tests.poison import poison_next  # which imports much, that no other event needs

        poison_next(event)
        return
    if event == "interrupt":
        raise KeyboardInterrupt
    if event == "fail":
        raise ZeroDivisionError("what\never")
    if event == "hang":
        os.kill(_trainer(), signal.SIGTERM)
        time.sleep(1)
        return
    for name in event.split("+"):
        os.kill(_trainer(), getattr(signal, name))


def _trainer() -> int:
    """The process that trains, also in one of the loader's workers."""
    if torch.utils.data.get_worker_info() is None:
        return os.getpid()
    return os.getppid()


def write_images(
    root: Path, classes: list[str], train: int, held_out: int, size: int = 32, test: int = 0
) -> Path:
    """Writes images whose brightness encodes the class to root/train, val and, if any, test."""
    rng = np.random.default_rng(0)
    most = max(1, len(classes) - 1)
    numbers = {"train": train, "val": held_out, "test": test}
    for split, number in numbers.items():
        if number == 0:
            continue
        for label, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            brightness = 190 * label // most
            for i in range(number):
                noise = rng.integers(0, 60, (size, size + 8, 3))
                pixels = (noise + brightness).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


def write_cifar(folder: Path, kind: Any, patch: Any) -> Path:
    """Writes a small archive of CIFAR, which torchvision's class then takes for the whole one."""
    content = folder / "content"
    content.mkdir(parents=True)
    _write_batches(content, kind)
    archive = folder / kind.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(content, kind.base_folder)
    for listing in ("train_list", "test_list"):
        names = [name for name, _ in getattr(kind, listing)]
        patch.setattr(kind, listing, [[name, _digest(content / name)] for name in names])
    digest = _digest(content / kind.meta["filename"])
    patch.setattr(kind, "meta", {**kind.meta, "md5": digest})
    patch.setattr(kind, "url", "http://127.0.0.1:1/archive")  # where nobody answers
    patch.setenv("no_proxy", "127.0.0.1")
    patch.setattr(kind, "tgz_md5", _digest(archive))
    return archive


def _write_batches(content: Path, kind: Any) -> None:
    """Writes the files of CIFAR, with an image of each class in each."""
    rng = np.random.default_rng(0)
    key = "labels"
    number = 10
    if kind.__name__ == "CIFAR100":
        key = "fine_labels"
        number = 100
    for name, _ in kind.train_list + kind.test_list:
        data = rng.integers(0, 256, (number, 3072)).astype(np.uint8)
        batch = {"data": data, key: list(range(number))}
        (content / name).write_bytes(pickle.dumps(batch))
    classes = {kind.meta["key"]: [f"class {i}" for i in range(number)]}
    (content / kind.meta["filename"]).write_bytes(pickle.dumps(classes))


def _digest(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()
