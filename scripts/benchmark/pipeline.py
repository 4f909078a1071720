"""Benchmarks besides steps: images per second of one data-loading worker, and start-up."""

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

from reproduction.config import TRAIN
from reproduction.data.build import build_training_images
from reproduction.data.images import ArrayImages, FileImages, ImageSource, cache_in_memory
from reproduction.system.timing import Work, time_in_turns
from scripts.benchmark.measure import CCT, VIT, Row, Scope, summarize
from scripts.benchmark.steps import step_config

SMALL = "CIFAR, held in memory, to 32 px"
FILES = "JPEG of 500 x 375, to 224 px"
PHOTOS = "500 x 375, held in memory, to 224 px"
FEEDS = {SMALL: CCT, FILES: VIT, PHOTOS: VIT}  # images -> model trained on them
PHOTO = (375, 500)  # rows and columns, typical of ImageNet
PHOTO_MIB = 8  # enough to hold all photos
GRAIN = 8  # pixels between the colours from which a synthetic photo is interpolated


def measure_pipeline(scope: Scope, device: torch.device) -> list[dict[str, Any]]:
    """Loads all kinds of images in this process, with one thread, as a worker does."""
    with tempfile.TemporaryDirectory() as folder:
        files = make_photos(Path(folder))
        images = {SMALL: small_images(), FILES: files, PHOTOS: cache_in_memory(files, PHOTO_MIB, 1)}
        loads = {name: _load(FEEDS[name], images[name], scope.images) for name in images}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            times = time_in_turns(loads, scope.starts)
        finally:
            torch.set_num_threads(threads)
    rows: dict[str, Row] = {
        name: {
            "ms": (summary := summarize(ms)),
            "images_per_second": 1000 * scope.images / summary["median"],
        }
        for name, ms in times.items()
    }
    about = f"batches of {scope.images} with the recipes' transforms, in one process of one thread"
    return [{"title": "input pipeline, per worker", "about": about, "rows": rows}]


def _load(model: str, images: ImageSource, number: int) -> Callable[[], object]:
    """Returns work that loads a batch with the transforms of the model's recipe."""
    config = step_config(model, [], "float32")
    training = build_training_images(config, images)
    keys = [(0, index % len(images)) for index in range(number)]
    return lambda: default_collate(training.__getitems__(keys))


def small_images() -> ImageSource:
    """Noise of CIFAR's image size, in memory like CIFAR."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 32, 32, 3), dtype=np.uint8)
    return ArrayImages(pixels, [0] * len(pixels))


def make_photos(folder: Path) -> FileImages:
    """Writes synthetic photos: smooth colours under fine noise, some 100 kB each."""
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


def workers_needed(report: Mapping[str, Any]) -> dict[str, Any]:
    """A group with the images/s of plain steps and the workers needed, for each kind of images.

    None if a step is not measured, such as a GPU's in the report of a CPU.
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
    """Yields (name, images/s) of the model's plain steps on this device and on a GPU."""
    groups: list[Mapping[str, Any]] = report["sections"].get("steps", [])
    device = report["machine"]["device"]
    matches = [group for group in groups if group["title"].startswith(f"training step: {model},")]
    for group in matches:
        name = group["title"].removeprefix("training step: ")
        yield f"{name}, {device}", group["rows"]["plain"]["images_per_second"]
    if not matches:
        yield f"{model}, {device}", None
    if device != "cuda":
        yield f"{model}, cuda", None


COMMANDS = {"--help": 0, "recipe.epochs=0": 2}  # argument -> exit status


def measure_startup(scope: Scope, device: torch.device) -> list[dict[str, Any]]:
    """Times complete processes, warm."""
    works: dict[str, Work] = {
        f"python train.py {argument}": partial(_run, argument, status)
        for argument, status in COMMANDS.items()
    }
    times = time_in_turns(works, scope.starts)
    rows: dict[str, Row] = {name: {"ms": summarize(ms)} for name, ms in times.items()}
    return [{"title": "start-up", "about": "whole processes, warm", "rows": rows}]


def _run(argument: str, status: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(
            [sys.executable, str(TRAIN), argument], cwd=folder, capture_output=True, check=False
        )
    assert process.returncode == status, process.stderr.decode()
