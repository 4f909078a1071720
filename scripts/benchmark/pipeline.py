"""Benchmarks beside steps: loading of images, attention kernels and start-up."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import default_collate

from reproduction.config import TRAIN
from reproduction.data.build import build_training_images, build_training_loader
from reproduction.data.images import ArrayImages, FileImages, ImageSource, cache_in_memory
from reproduction.data.loaders import TrainingBatches
from reproduction.data.sources import Source
from reproduction.training.evaluate import DTYPES
from scripts.benchmark.measure import Group, Row, Scope, calls_on, summarize
from scripts.benchmark.timing import Work, synchronize, time_in_turns
from scripts.benchmark.trainers import CCT, VIT, precision_on, sharp_trainer, step_config

SMALL = "CIFAR, held in memory, to 32 px"
FILES = "JPEG of 500 x 375, to 224 px"
PHOTOS = "500 x 375, held in memory, to 224 px"
FEEDS = {SMALL: CCT, FILES: VIT, PHOTOS: VIT}  # images -> model trained on them
PHOTO = (375, 500)  # rows and columns, typical of ImageNet
PHOTO_MIB = 8  # enough to hold all photos
GRAIN = 8  # pixels between the colours from which a synthetic photo is interpolated


def measure_pipeline(scope: Scope, device: torch.device) -> list[Group]:
    """Loads all kinds of images in this process, with one thread, as a worker does."""
    with tempfile.TemporaryDirectory() as folder:
        files = make_photos(Path(folder))
        images = {SMALL: small_images(), FILES: files, PHOTOS: cache_in_memory(files, PHOTO_MIB, 1)}
        loads = {name: _load(FEEDS[name], images[name], scope.images) for name in images}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            times = time_in_turns(loads, scope.few)
        finally:
            torch.set_num_threads(threads)
        whole = [_to_weights(scope, device, files)] if scope.workers else []
    rows: dict[str, Row] = {
        name: {
            "ms": (summary := summarize(ms)),
            "images_per_second": 1000 * scope.images / summary["median"],
        }
        for name, ms in times.items()
    }
    about = f"batches of {scope.images} with the recipes' transforms, in one process of one thread"
    return [{"title": "input pipeline, per worker", "about": about, "rows": rows}, *whole]


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


def _to_weights(scope: Scope, device: torch.device, files: FileImages) -> Group:
    """Images per second from files or memory to updated parameters, by number of workers."""
    number = 40 * scope.images
    many = FileImages([files.samples[index % len(files)] for index in range(number)])
    held = ArrayImages(np.zeros((number, 32, 32, 3), dtype=np.uint8), [0] * number)
    rows: dict[str, Row] = {}
    for model in scope.loading:
        images: ImageSource = many if model == VIT else held
        for workers in scope.workers:
            speed = _end_to_end(model, images, scope.images, workers, device)
            rows[f"{model}, {workers} workers"] = {"images_per_second": speed}
    about = f"batches of {scope.images}, steps with HTM and VTM"
    return {"title": "from loading to updated weights", "about": about, "rows": rows}


def _end_to_end(
    model: str, images: ImageSource, batch: int, workers: int, device: torch.device
) -> float:
    overrides = (f"dataset.workers={workers}", f"recipe.batch_size={batch}")
    config = step_config(model, ["htm", "vtm"], precision_on(device), *overrides)
    trainer, order = sharp_trainer(config, device), TrainingBatches(len(images), batch, 0)
    source, pin = Source(images, images, []), device.type == "cuda"
    seen, start = 0, 0.0
    for count, (pixels, classes) in enumerate(build_training_loader(config, source, order, pin)):
        if count == len(order) // 4:  # warm: workers run, memory is allocated
            synchronize()
            seen, start = 0, time.perf_counter()
        trainer.train_step(pixels, classes % len(trainer.classes), len(pixels))
        trainer.step += 1
        seen += len(pixels)
    synchronize()
    return seen / (time.perf_counter() - start)


BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
HEADS = {CCT: (4, 256, 64), VIT: (12, 197, 64)}  # heads, tokens, width of a head


def measure_attention(scope: Scope, device: torch.device) -> list[Group]:
    """All attention kernels of torch that are available here, forward and backward."""
    rows: dict[str, Row] = {}
    for model, sizes in HEADS.items():
        dtype = DTYPES[precision_on(device)]
        q, k, v = (torch.randn(scope.detectors, *sizes, device=device, dtype=dtype) for _ in "qkv")
        q.requires_grad_()
        for name in BACKENDS:
            work = partial(_attend, getattr(SDPBackend, name), q, k, v)
            row = rows[f"{model}, {name.lower()}"] = {"ms": None}  # if it is not available here
            with suppress(RuntimeError):
                times = time_in_turns({name: work}, scope.few, calls_on(device))
                row["ms"] = summarize(times[name])
    about = f"{precision_on(device)}, batch of {scope.detectors}, forward and backward"
    return [{"title": "attention kernels", "about": about, "rows": rows}]


def _attend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> None:
    with sdpa_kernel(backend):
        F.scaled_dot_product_attention(q, k, v).sum().backward()


COMMANDS = {"--help": 0, "recipe.epochs=0": 2}  # argument -> exit status


def measure_startup(scope: Scope, device: torch.device) -> list[Group]:
    """Times complete processes, warm."""
    works: dict[str, Work] = {
        f"python train.py {argument}": partial(_run, argument, status)
        for argument, status in COMMANDS.items()
    }
    times = time_in_turns(works, scope.few)
    rows: dict[str, Row] = {name: {"ms": summarize(ms)} for name, ms in times.items()}
    return [{"title": "start-up", "about": "whole processes, warm", "rows": rows}]


def _run(argument: str, status: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(
            [sys.executable, str(TRAIN), argument], cwd=folder, capture_output=True, check=False
        )
    assert process.returncode == status, process.stderr.decode()
