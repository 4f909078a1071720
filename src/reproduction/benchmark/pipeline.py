"""Input pipeline: images that one worker decodes, augments and batches in a second."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import default_collate

from reproduction.benchmark.appetite import FEEDS, FILES, PHOTOS, SMALL
from reproduction.benchmark.scope import Scope
from reproduction.benchmark.timing import Row, summary, time_in_turns
from reproduction.benchmark.trainers import step_config
from reproduction.data.build import build_training_images
from reproduction.data.images import ArrayImages, FileImages, ImageSource, held
from reproduction.data.loaders import TrainingImages
from reproduction.data.sources import Source

PHOTO = (375, 500)  # rows and columns, usual ones of ImageNet
MIB_OF_PHOTOS = 8  # enough to hold them all
GRAIN = 8  # pixels between the colours that a made-up photo is interpolated from


def measure_pipeline(scope: Scope, device: torch.device) -> list[dict[str, Any]]:
    """All kinds of images, in this process, with the one thread that a worker has."""
    with tempfile.TemporaryDirectory() as folder:
        files = photos(Path(folder))
        images = {SMALL: small_images(), FILES: files, PHOTOS: held(files, MIB_OF_PHOTOS, 1)}
        loads = {name: _load(FEEDS[name], images[name], scope.images) for name in images}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            times = time_in_turns(loads, scope.starts)
        finally:
            torch.set_num_threads(threads)
    rows: dict[str, Row] = {
        name: {
            "ms": (spent := summary(ms)),
            "images_per_second": 1000 * scope.images / spent["median"],
        }
        for name, ms in times.items()
    }
    about = f"batches of {scope.images} with the recipes' transforms, in one process of one thread"
    return [{"title": "input pipeline, per worker", "about": about, "rows": rows}]


def _load(model: str, images: ImageSource, number: int) -> Callable[[], object]:
    """Loads a batch, by the recipe that the model is trained with."""
    config = step_config(model, [], "float32")
    training = build_training_images(config, Source(images, images, []))
    keys = [(0, index % len(images)) for index in range(number)]
    return partial(_batch, training, keys)


def _batch(images: TrainingImages, keys: list[tuple[int, int]]) -> object:
    return default_collate(images.__getitems__(keys))


def small_images() -> ImageSource:
    """Noise in the size of CIFAR's images, as these are held in memory."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 32, 32, 3), dtype=np.uint8)
    return ArrayImages(pixels, [0] * len(pixels))


def photos(folder: Path) -> ImageSource:
    """A folder of made-up photos: smooth colours under fine noise, some 100 kB each."""
    rng = np.random.default_rng(0)
    paths = [str(folder / f"{number}.jpg") for number in range(8)]
    for path in paths:
        rows, columns = PHOTO
        coarse = rng.integers(0, 256, (rows // GRAIN, columns // GRAIN, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((columns, rows), Image.Resampling.BICUBIC)
        noisy = np.asarray(smooth) + rng.normal(0, 6, (rows, columns, 3))
        image = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
        image.save(path, quality=90)
    return FileImages([(path, 0) for path in paths])
