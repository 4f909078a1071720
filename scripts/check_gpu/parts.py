"""What the parts have in common: where they run, what they find, small trainers and their steps."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from reproduction.training.loop import Trainer
from reproduction.training.metrics import Line
from scripts.benchmark.steps import sharp_trainer, step_config

SMALL = "cct_2_3x2"
BOTH, ALL = ["htm", "vtm"], ["mixup", "cutmix", "manifold_mixup", "htm", "vtm"]
EVERY_STACK: list[list[str]] = [[], ["htm"], ["vtm"], BOTH]
UNDROPPED = ("model.drop_path=0", "model.attn_drop=0")
LAYERS = "augmentation.manifold_mixup.layers=[0,1]"


class Scope(NamedTuple):
    """Where, and how much: `tiny` tries the parts out."""

    device: torch.device
    tiny: bool = False


class Finding(NamedTuple):
    """What was tried, what came of it, and whether that is right; None where nothing is judged."""

    what: str
    figure: str
    is_right: bool | None = None


Part = Callable[[Scope], Iterator[Finding]]


def small_trainer(
    device: torch.device, model: str, stack: list[str], precision: str, *told: str
) -> Trainer:
    """With new weights of sharp attention, alike on every device."""
    return sharp_trainer(step_config(model, stack, precision, *told), device)


def steps_of(trainer: Trainer, batch: int, steps: int) -> list[Line]:
    """Trains on random images, others in every step, and tells the lines of its log."""
    generator, size = torch.Generator().manual_seed(3), trainer.config.model.image_size
    for _ in range(steps):
        shape = (batch, 3, size, size)
        images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        classes = torch.randint(len(trainer.classes), (batch,), generator=generator)
        parts = trainer.train_step(images, classes, batch)
        trainer.step += 1
        trainer.metrics.add(trainer.step, 1, 0.1, parts, trainer.update.not_finite)
    return trainer.metrics.fetch()


def distance_of_losses(lines: list[Line], others: list[Line]) -> float:
    """The largest difference of losses, as a share of them; inf where one is not finite."""
    shares = [abs(x["loss"] / y["loss"] - 1) for x, y in zip(lines, others, strict=True)]
    return max(shares) if all(map(math.isfinite, shares)) else math.inf
