"""Trainers without data and files, whose steps and evaluation are measured and checked."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from reproduction.config import Config
from reproduction.data.build import build_training_inputs
from reproduction.models.build import build_module, place, without_weights
from reproduction.runs.compose import config_of
from reproduction.training.distributed import World, allow_tf32
from reproduction.training.loop import MicroBatch, Trainer

CCT, VIT = "cct_7_3x1", "vit_base_patch16_224"
# model -> data set, recipe, classes
TRAINED_AS = {
    "cct_2_3x2": ("digits", "quickstart", 10),
    CCT: ("cifar100", "cifar_cct", 100),
    VIT: ("imagenet1k", "imagenet_vit", 1000),
}
# Factors on the qkv weights of new models, whose attention is nearly uniform. In deeper models too
# large a factor makes rounding errors grow.
SHARPNESS = {"cct_2_3x2": 12, CCT: 6, VIT: 3}

Step = Callable[[], list[MicroBatch]]


def bare_trainer(
    config: Config, device: torch.device, classes: int, model: nn.Module | None = None
) -> Trainer:
    """Builds a trainer without data and files, with `model` or one with new weights."""
    allow_tf32(config.recipe.tf32)
    torch.manual_seed(config.seed)
    module = build_module(without_weights(config.model), config.augmentation, classes, model)
    return Trainer(
        config,
        World(0, 1, device),
        module=place(module, device).train(),
        classes=[str(label) for label in range(classes)],
        inputs=build_training_inputs(config, device),
        steps_per_epoch=1,
    )


def sharp_trainer(config: Config, device: torch.device, shared: nn.Module | None = None) -> Trainer:
    """A trainer of `shared`, or of a new model with sharp attention, so that saliency differs."""
    name = config.model.name
    trainer = bare_trainer(config, device, TRAINED_AS[name][2], shared)
    model: Any = trainer.module.model
    with torch.no_grad():
        for block in model.blocks if shared is None else ():
            block.attn.qkv.weight.mul_(SHARPNESS[name])
    return trainer


def random_batch(trainer: Trainer, batch_size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns images in the format of the loaders, the same ones for a seed, and classes."""
    device, size = trainer.world.device, trainer.config.model.image_size
    generator = torch.Generator().manual_seed(seed)
    shape = (batch_size, 3, size, size)
    images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    return images.to(device), torch.arange(batch_size, device=device) % len(trainer.classes)


def step_of(trainer: Trainer, batch_size: int) -> Step:
    """Returns a function that runs `Trainer.train_step` on the same images each time."""
    images, targets = random_batch(trainer, batch_size)

    def step() -> list[MicroBatch]:
        parts = trainer.train_step(images, targets, batch_size)
        trainer.step += 1
        return parts

    return step


def precision_on(device: torch.device) -> str:
    """bf16 on a GPU; float32 on a CPU, which has no fast lower precision."""
    return "bf16" if device.type == "cuda" else "float32"


def step_config(model: str, stack: list[str], precision: str, *overrides: str) -> Config:
    """The model's own recipe without input mixup; HTM mixes every sample unless overridden."""
    dataset, recipe, _ = TRAINED_AS[model]
    settings = [f"model={model}", f"dataset={dataset}", f"recipe={recipe}"]
    settings += [f"augmentation=[{','.join(stack)}]", f"recipe.precision={precision}"]
    settings += ["augmentation.htm.tau=inf"] if "htm" in stack else []
    settings += overrides  # the last value of a key counts
    return config_of(settings)


def as_measured(config: Config) -> Config:
    """Returns the configuration to measure: one device, and HTM mixes all samples (tau=inf, rho=0).

    Runs of the same speed have the same one.
    """
    stack = config.augmentation
    if stack.htm is not None:
        stack = replace(stack, htm=replace(stack.htm, tau=math.inf, rho=0.0))
    return replace(
        config,
        seed=0,
        devices=1,
        augmentation=stack,
        dataset=replace(config.dataset, root=None, limit=None),
        recipe=replace(config.recipe, epochs=2, warmup_epochs=0, cooldown_epochs=0),
    )
