"""Writes the images of cifar10_1k.yaml and cifar10_5k.yaml to data/cifar10-jpeg.

CIFAR-10 is downloaded by torchvision to data/. Its images become JPEG files of quality 75, a folder
for each class, numbered in the order of the archive: train/airplane/0000.jpg.
"""

from collections import Counter
from pathlib import Path

from torchvision.datasets import CIFAR10

DATA = Path("data")


def write(images: CIFAR10, folder: Path) -> None:
    """Writes each image to the folder of its class."""
    written = Counter[str]()
    for image, label in images:
        name = images.classes[label]
        path = folder / name / f"{written[name]:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, quality=75)
        written[name] += 1


if __name__ == "__main__":
    write(CIFAR10(DATA, train=True, download=True), DATA / "cifar10-jpeg" / "train")
    write(CIFAR10(DATA, train=False, download=True), DATA / "cifar10-jpeg" / "test")
