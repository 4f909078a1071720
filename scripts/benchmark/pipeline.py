"""What a user waits for besides steps: images that one worker loads in a second, start-up."""

import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import default_collate

from reproduction.config import CONF_DIR
from reproduction.data.build import build_training_images
from reproduction.data.images import ArrayImages, FileImages, ImageSource, cache_in_memory
from reproduction.data.sources import Source
from reproduction.system.timing import Work, time_in_turns
from scripts.benchmark.measure import CCT, VIT, Row, Scope, summary
from scripts.benchmark.steps import step_config

SMALL = "CIFAR, held in memory, to 32 px"
FILES = "JPEG of 500 x 375, to 224 px"
PHOTOS = "500 x 375, held in memory, to 224 px"
FEEDS = {SMALL: CCT, FILES: VIT, PHOTOS: VIT}  # images -> model that trains on such
PHOTO = (375, 500)  # rows and columns, usual ones of ImageNet
MIB_OF_PHOTOS = 8  # enough to hold them all
GRAIN = 8  # pixels between the colours that a made-up photo is interpolated from


def measure_pipeline(scope: Scope, device: torch.device) -> list[dict[str, Any]]:
    """All kinds of images, in this process, with the one thread that a worker has."""
    with tempfile.TemporaryDirectory() as folder:
        files = photos(Path(folder))
        images = {
            SMALL: small_images(),
            FILES: files,
            PHOTOS: cache_in_memory(files, MIB_OF_PHOTOS, 1),
        }
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
    return lambda: default_collate(training.__getitems__(keys))


def small_images() -> ImageSource:
    """Noise in the size of CIFAR's images, as these are held in memory."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 32, 32, 3), dtype=np.uint8)
    return ArrayImages(pixels, [0] * len(pixels))


def photos(folder: Path) -> FileImages:
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


def appetite(report: Mapping[str, Any]) -> dict[str, Any]:
    """A group of rows for every kind of images: images/s of a plain step, workers that feed it.

    None where a step is not measured, as a GPU's in the report of a CPU.
    """
    (pipeline,) = report["sections"]["pipeline"]
    rows: dict[str, dict[str, float | None]] = {}
    for images, model in FEEDS.items():
        loaded = pipeline["rows"][images]["images_per_second"]
        for step, consumed in _steps(report, model):
            workers = None if consumed is None else math.ceil(consumed / loaded)
            rows[f"{step}: {images}"] = {"images_per_second": consumed, "workers": workers}
    about = "images/s of plain training steps in this report, and the workers that load as many"
    return {"title": "data-loading workers needed", "about": about, "rows": rows}


def _steps(report: Mapping[str, Any], model: str) -> Iterator[tuple[str, float | None]]:
    """(what, images/s) of the model's plain steps on this device, and of a GPU if it is none."""
    groups: list[Mapping[str, Any]] = report["sections"].get("steps", [])
    device = report["machine"]["device"]
    found = [group for group in groups if group["title"].startswith(f"training step: {model},")]
    for group in found:
        what = group["title"].removeprefix("training step: ")
        yield f"{what}, {device}", group["rows"]["plain"]["images_per_second"]
    if not found:
        yield f"{model}, {device}", None
    if device != "cuda":
        yield f"{model}, cuda", None


TRAIN = CONF_DIR.parent / "train.py"
COMMANDS = {"--help": 0, "recipe.epochs=0": 2}  # argument -> status


def measure_startup(scope: Scope, device: torch.device) -> list[dict[str, Any]]:
    """Whole processes, warm."""
    works: dict[str, Work] = {
        f"python train.py {argument}": partial(_run, argument, status)
        for argument, status in COMMANDS.items()
    }
    times = time_in_turns(works, scope.starts)
    rows: dict[str, Row] = {name: {"ms": summary(ms)} for name, ms in times.items()}
    return [{"title": "start-up", "about": "whole processes, warm", "rows": rows}]


def _run(argument: str, status: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [sys.executable, str(TRAIN), argument], cwd=folder, capture_output=True, check=False
        )
    assert ended.returncode == status, ended.stderr.decode()
