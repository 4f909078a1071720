"""Measures how fast the trainer trains and evaluates a configuration on this machine."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from reproduction.config import Config
from reproduction.data.build import build_training_inputs
from reproduction.data.folders import Sizes, data_sizes
from reproduction.data.loaders import TrainingBatches
from reproduction.models.build import build_module, count_macs, place, without_weights
from reproduction.runs.folder import RunFolder
from reproduction.runs.identity import run_hash
from reproduction.system.errors import PlainError, UserError
from reproduction.system.timing import Work, time_calls
from reproduction.training.distributed import World, allow_tf32
from reproduction.training.evaluate import evaluate
from reproduction.training.loop import MicroBatch, Trainer

FLOPS_PER_MAC = 6  # of training: 2 in the forward pass, twice that in the backward pass
ROUNDS = 5
ROUND_SECONDS = 0.5  # at least
FEW_IMAGES, STEP_SECONDS = 2, 2.0  # on a CPU: batch size of the first trial, target time of a step


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Images per second in training (median, slowest and fastest round) and in evaluation.

    `batch_size` and `macs` (of one image) are those of the measurement.
    """

    batch_size: int
    training: float
    slowest: float
    fastest: float
    evaluation: float
    macs: int


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


def speed_key(config: Config) -> str:
    """Returns a key that all configurations of the same speed share."""
    return run_hash(as_measured(config))


def sizes_of(config: Config) -> Sizes:
    """Returns the images of an epoch, the held-out images and the classes; see `data_sizes`."""
    sizes = data_sizes(config.dataset.name, config.dataset.root)
    train, held_out = config.dataset.limit, config.dataset.eval_limit
    return sizes._replace(
        train=min(train or sizes.train, sizes.train),
        held_out=min(held_out or sizes.held_out, sizes.held_out),
    )


def bare_trainer(
    config: Config, device: torch.device, classes: int, model: nn.Module | None = None
) -> Trainer:
    """Builds a trainer without data and files, with `model` or one with new weights."""
    no_data: Any = []
    allow_tf32(config.recipe.tf32)
    torch.manual_seed(config.seed)
    module = build_module(without_weights(config.model), config.augmentation, classes, model)
    return Trainer(
        config,
        World(0, 1, device),
        RunFolder(config.output_root),
        module=place(module, device).train(),
        classes=[str(label) for label in range(classes)],
        inputs=build_training_inputs(config, device),
        batches=TrainingBatches(1, 1, config.seed),
        train_loader=no_data,
        eval_loader=no_data,
    )


def step_of(trainer: Trainer, batch_size: int) -> Callable[[], list[MicroBatch]]:
    """Returns a function that runs `Trainer.train_step` on the same random images each time."""
    images, targets = _synthetic(trainer, batch_size)

    def step() -> list[MicroBatch]:
        parts = trainer.train_step(images, targets, batch_size)
        trainer.step += 1
        return parts

    return step


def measure_speed(config: Config, device: str, batch_size: int | None = None) -> Speed:
    """Times training steps and evaluation on synthetic images; writes nothing.

    `device` is `cpu` or `cuda`. The default of `batch_size` is that of the recipe, reduced on a CPU
    to steps of two seconds. Raises UserError if the batch exceeds the memory of the GPU.
    """
    least = config.recipe.grad_accum_steps
    if batch_size is not None and batch_size < least:
        raise UserError(f"--batch-size={batch_size}: recipe.grad_accum_steps={least} needs as many")
    trainer = bare_trainer(as_measured(config), torch.device(device), sizes_of(config).classes)
    size = batch_size or (config.recipe.batch_size if device == "cuda" else _cpu_batch(trainer))
    try:
        training, evaluation = (
            [size / seconds for seconds in _rounds(work)]
            for work in (step_of(trainer, size), _evaluation_of(trainer, size))
        )
    except (torch.OutOfMemoryError, PlainError) as error:  # of evaluation, of a training step
        if torch.OutOfMemoryError not in (type(error), type(error.__cause__)):
            raise
        raise UserError(f"--batch-size={size}: too large for the memory of this GPU") from error
    return Speed(
        batch_size=size,
        training=median(training),
        slowest=min(training),
        fastest=max(training),
        evaluation=median(evaluation),
        macs=count_macs(trainer.module.model, trainer.config.model.image_size).total,
    )


def _cpu_batch(trainer: Trainer) -> int:
    """Returns a batch size with steps of STEP_SECONDS, at most that of the recipe."""
    few = max(FEW_IMAGES, trainer.recipe.grad_accum_steps)
    step = step_of(trainer, few)
    seconds = min(time_calls(step) for _ in range(2))
    return max(few, min(trainer.recipe.batch_size, int(few * STEP_SECONDS / seconds)))


def _evaluation_of(trainer: Trainer, batch_size: int) -> Work:
    batches, normalize = [[*_synthetic(trainer, batch_size)]], trainer.inputs.normalize
    precision = trainer.recipe.precision
    return lambda: evaluate(trainer.module, normalize, batches, trainer.world, precision)


def _synthetic(trainer: Trainer, batch_size: int) -> tuple[Tensor, Tensor]:
    """Returns random images, in the format of the loaders, and classes."""
    device, size = trainer.world.device, trainer.config.model.image_size
    images = torch.randint(256, (batch_size, 3, size, size), dtype=torch.uint8).to(device)
    return images, torch.arange(batch_size, device=device) % len(trainer.classes)


def _rounds(work: Work) -> list[float]:
    """Returns the seconds per call in each round, after a warm-up."""
    once = min(time_calls(work) for _ in range(2))
    calls = math.ceil(ROUND_SECONDS / once)
    return [time_calls(work, calls) / calls for _ in range(ROUNDS)]
