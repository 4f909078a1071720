"""Trainers without images and files, whose steps can be timed."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from reproduction.benchmark.oracle import Oracle
from reproduction.benchmark.scope import TRAINED_AS
from reproduction.cli import compose
from reproduction.config import Config
from reproduction.data.build import build_training_inputs
from reproduction.data.loaders import BrokenImages, TrainingBatches
from reproduction.models.build import build_module, place
from reproduction.parse import parse
from reproduction.runs import RunFolder
from reproduction.training.distributed import World
from reproduction.training.loop import Trainer
from tokenmixup import Output

SHARPNESS = 12  # of new weights, whose attention is nearly even


def step_config(model: str, stack: list[str], precision: str, *overrides: str) -> Config:
    """The model's own recipe without input mixup; HTM mixes every sample."""
    dataset, recipe, _ = TRAINED_AS[model]
    told = [f"model={model}", f"dataset={dataset}", f"recipe={recipe}", "name=benchmark"]
    told += [f"augmentation=[{','.join(stack)}]", f"recipe.precision={precision}", *overrides]
    told += ["augmentation.htm.tau=inf"] if "htm" in stack else []
    return parse(compose("train", told).raw, needs_data=False)


def bare_trainer(
    config: Config,
    device: torch.device,
    shared: nn.Module | None = None,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Trainer:
    """The trainer of a run on `shared`, or on a new model with sharp attention.

    One that compiles trains a copy, since others go on with the blocks of `shared` as they are.
    """
    nothing: Any = []
    classes = TRAINED_AS[config.model.name][2]
    torch.manual_seed(config.seed)
    module = build_module(config.model, config.augmentation, classes, config.recipe.non_finite)
    sharpen(module.model)
    if shared is not None:
        module.model = deepcopy(shared) if config.compile else shared
    return Trainer(
        config,
        World(0, 1, device),
        RunFolder.of(config),
        module=place(module, device).to(memory_format=memory_format).train(),
        classes=[str(label) for label in range(classes)],
        inputs=build_training_inputs(config, classes, device),
        batches=TrainingBatches(1, 1, config.seed),
        train_loader=nothing,
        eval_loader=nothing,
        broken=BrokenImages(0),
    )


def oracle_trainer(config: Config, device: torch.device) -> Trainer:
    """The same, but training by the oracle, in the memory format of a new model."""
    trainer = bare_trainer(config, device, memory_format=torch.contiguous_format)
    trainer.update.parallel = Oracle(trainer.module)
    return trainer


@torch.no_grad()
def sharpen(model: Any) -> None:
    """Scales queries and keys (and values) so that saliency differs between tokens."""
    for block in model.blocks:
        block.attn.qkv.weight.mul_(SHARPNESS)


def step_of(trainer: Trainer, batch_size: int) -> Callable[[], Output]:
    """One batch after another through `Trainer.train_step`, always of the same random images."""
    device, size = trainer.world.device, trainer.config.model.image_size
    images = torch.randint(256, (batch_size, 3, size, size), dtype=torch.uint8).to(device)
    targets = torch.arange(batch_size, device=device) % len(trainer.classes)

    def step() -> Output:
        (part,) = trainer.train_step(images, targets, batch_size)
        trainer.step += 1
        return part.output

    return step
