"""Stage 2: the cost of training on this GPU; only ViT-B's HTM / plain has a bound."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from reproduction.data.build import build_training_loader
from reproduction.data.images import ArrayImages, FileImages, ImageSource
from reproduction.data.loaders import TrainingBatches
from reproduction.data.sources import Source
from reproduction.system.errors import PlainError
from reproduction.system.timing import Work, spread_of, time_calls, time_in_turns
from scripts.benchmark.measure import CCT, ON_GPU, QUICK, VIT, calls_on, compare
from scripts.benchmark.parts import measure_detectors
from scripts.benchmark.pipeline import make_photos
from scripts.benchmark.report import Group
from scripts.benchmark.speed import step_of
from scripts.benchmark.steps import measure_oracle, measure_steps, precision_on
from scripts.check_gpu.parts import BOTH, SMALL, Finding, Scope, small_trainer

SIZES = dataclasses.replace(
    ON_GPU, pairs=12, steps=((CCT, 128), (VIT, 128)), oracle=((CCT, 128),), compiled=False
)
VIT_BOUND = 1.05  # HTM / plain
BATCHES = (128, 256, 504, 1024)
WORKERS = (4, 8, 16)
BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
HEADS = {CCT: (4, 256, 64), VIT: (12, 197, 64)}  # heads, tokens, width of a head


def _by_benchmark(measure: Callable[..., list[Group]], scope: Scope) -> Iterator[Finding]:
    for group in measure(QUICK if scope.tiny else SIZES, scope.device):
        for name, row in group["rows"].items():
            figure = f"{row['ms']['median']:.4g} ms, {_ratio(row)}"
            if "images_per_second" in row:
                figure += f", {row['images_per_second']:.0f} images/s, {row['peak_mib']:.0f} MiB"
            yield Finding(f"{group['title']}: {name}", figure)
        if VIT in group["title"] and "HTM" in group["rows"]:
            ratio = group["rows"]["HTM"]["ratio"]["median"]
            word = "met" if ratio <= VIT_BOUND else "missed"
            yield Finding("ViT-B/16: HTM / plain", f"{ratio:.3f}: {VIT_BOUND} is {word}")


def _ratio(row: dict[str, Any]) -> str:
    low, high = row["ratio"]["interval"]
    return f"{row['ratio']['median']:.3f} of the first ({low:.3f} to {high:.3f})"


steps = partial(_by_benchmark, measure_steps)
detectors = partial(_by_benchmark, measure_detectors)
oracle = partial(_by_benchmark, measure_oracle)


def _models(scope: Scope) -> list[str]:
    return [SMALL] if scope.tiny else [CCT, VIT]


def busy(scope: Scope) -> Iterator[Finding]:
    """The shares of a step during which the GPU computes and the host matches pairs."""
    batch, repeats = (4, 2) if scope.tiny else (128, 10)
    for model in _models(scope):
        for stack in ([], BOTH):
            trainer = small_trainer(scope.device, model, stack, precision_on(scope.device))
            spent = list[float]()
            if stack:
                rules = trainer.module.rules
                trainer.module.rules = rules._replace(match=_timed(rules.match, spent))
            step = step_of(trainer, batch)
            for _ in range(3):
                step()
            spent.clear()
            device = getattr(ProfilerActivity, scope.device.type.upper())
            with profile(activities=[device]) as record:
                wall = time_calls(step, repeats)
            kernels = [event for event in record.events() if event.device_type == DeviceType.CUDA]
            busy_seconds = _covered([(e.time_range.start, e.time_range.end) for e in kernels]) / 1e6
            share = f"{busy_seconds / wall:.0%}" if kernels else "not measured"
            figure = f"GPU busy {share}, host in the matching {sum(spent) / wall:.0%}"
            name = f"{model}, batch of {batch}, {'+'.join(stack) or 'plain'}"
            yield Finding(name, f"{figure}, {1000 * wall / repeats:.1f} ms with the profiler")


def _timed(match: Callable[..., Tensor], spent: list[float]) -> Callable[..., Tensor]:
    """Wraps `match` to record the seconds of the wait for the gain matrix, its copy and solver."""

    def timed(*args: Tensor) -> Tensor:
        start = time.perf_counter()
        donor = match(*args)
        spent.append(time.perf_counter() - start)
        return donor

    return timed


def _covered(intervals: list[tuple[float, float]]) -> float:
    """Total length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def batches(scope: Scope) -> Iterator[Finding]:
    """Plain, HTM and both at growing batch sizes, up to and beyond the ImageNet recipe's."""
    precision = precision_on(scope.device)
    for model in _models(scope):
        for batch in (4,) if scope.tiny else BATCHES:
            try:
                works: dict[str, Work] = {
                    "+".join(stack) or "plain": step_of(
                        small_trainer(scope.device, model, stack, precision), batch
                    )
                    for stack in ([], ["htm"], BOTH)
                }
                rows = compare(works, 4, calls_on(scope.device) // 3 or 1)
            except PlainError as error:
                yield Finding(f"{model}, batch of {batch}", str(error))
                continue
            for name, row in rows.items():
                speed = 1000 * batch / row["ms"]["median"]
                yield Finding(
                    f"{model}, batch of {batch}, {name}", f"{speed:.0f} images/s, {_ratio(row)}"
                )


def loader(scope: Scope) -> Iterator[Finding]:
    """Images per second from files or memory to updated parameters, by number of workers."""
    batch, number = (4, 16) if scope.tiny else (128, 128 * 40)
    with TemporaryDirectory() as folder:
        few = make_photos(Path(folder)).samples
        files = FileImages([few[index % len(few)] for index in range(number)])
        held = ArrayImages(np.zeros((number, 32, 32, 3), dtype=np.uint8), [0] * number)
        for model, images in ((CCT, held), (VIT, files)):
            for workers in (0,) if scope.tiny else WORKERS:
                speed = _end_to_end(scope, SMALL if scope.tiny else model, images, batch, workers)
                yield Finding(f"{model}, {workers} workers", f"{speed:.0f} images/s")


def _end_to_end(scope: Scope, model: str, images: ImageSource, batch: int, workers: int) -> float:
    overrides = (f"dataset.workers={workers}", f"recipe.batch_size={batch}")
    trainer = small_trainer(scope.device, model, BOTH, precision_on(scope.device), *overrides)
    order = TrainingBatches(len(images), batch, 0)
    source, pin = Source(images, images, []), scope.device.type == "cuda"
    feed = build_training_loader(trainer.config, source, order, pin)
    seen, start = 0, 0.0
    for count, (pixels, classes) in enumerate(feed):
        if count == len(order) // 4:  # warm: workers run, memory is allocated
            _wait(scope.device)
            seen, start = 0, time.perf_counter()
        trainer.train_step(pixels, classes % len(trainer.classes), len(pixels))
        trainer.step += 1
        seen += len(pixels)
    _wait(scope.device)
    return seen / (time.perf_counter() - start)


def backends(scope: Scope) -> Iterator[Finding]:
    """All attention kernels of torch that are available here, forward and backward."""
    calls = calls_on(scope.device)
    for model, (heads, tokens, width) in HEADS.items():
        shape = (2 if scope.tiny else 128, heads, tokens, width)
        dtype = torch.float32 if scope.device.type == "cpu" else torch.bfloat16
        q, k, v = (torch.randn(shape, device=scope.device, dtype=dtype) for _ in "qkv")
        q.requires_grad_()
        for name in BACKENDS:
            work = partial(_attend, getattr(SDPBackend, name), q, k, v)
            try:
                ms = spread_of(time_in_turns({name: work}, 5, calls)[name]).median
                yield Finding(f"{model}, {name.lower()}", f"{ms:.3g} ms, forward and backward")
            except RuntimeError:
                yield Finding(f"{model}, {name.lower()}", "not available here")


def _attend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> None:
    with sdpa_kernel(backend):
        F.scaled_dot_product_attention(q, k, v).sum().backward()
