"""How fast the trainer trains and evaluates a configuration on the machine at hand."""

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from reproduction.config import Config
from reproduction.cost import Speed, as_measured, sizes_of
from reproduction.data.build import build_training_inputs
from reproduction.data.loaders import BrokenImages, TrainingBatches
from reproduction.errors import UserError
from reproduction.models.build import build_module, count_macs, place, without_start
from reproduction.runs import RunFolder
from reproduction.training.distributed import World
from reproduction.training.evaluate import evaluate
from reproduction.training.loop import Trainer

ROUNDS = 5
ROUND_SECONDS = 0.5  # at least
FEW_IMAGES, STEP_SECONDS = 2, 2.0  # on a CPU: tried first, and how long a step should take

Work = Callable[[], None]


def measure_speed(config: Config, device: str, batch_size: int | None = None) -> Speed:
    """Times the trainer's steps and its evaluation on made-up images; writes nothing.

    `device` is `cpu` or `cuda`. Unless `batch_size` is given it is the recipe's, on a CPU as much
    of it as makes a step of two seconds. Raises UserError if it exceeds the GPU's memory.
    """
    world = World(0, 1, torch.device(device))
    least = config.recipe.grad_accum_steps
    if batch_size is not None and batch_size < least:
        raise UserError(f"--batch-size={batch_size}: recipe.grad_accum_steps={least} needs as many")
    trainer = _build_trainer(as_measured(config), world, sizes_of(config).classes)
    size = batch_size or (config.recipe.batch_size if device == "cuda" else _cpu_batch(trainer))
    try:
        return _measure(trainer, size)
    except torch.OutOfMemoryError as error:
        raise UserError(f"--batch-size={size}: too large for the memory of this GPU") from error


def _build_trainer(config: Config, world: World, classes: int) -> Trainer:
    """The trainer of a run, without images and with new weights."""
    nothing: Any = []
    torch.manual_seed(config.seed)
    module = build_module(without_start(config.model), config.augmentation, classes)
    module.train()
    return Trainer(
        config,
        world,
        RunFolder(config.output_root),
        module=place(module, world.device),
        classes=[str(label) for label in range(classes)],
        inputs=build_training_inputs(config, classes, world.device),
        batches=TrainingBatches(1, 1, config.seed),
        train_loader=nothing,
        eval_loader=nothing,
        broken=BrokenImages(0),
    )


def _cpu_batch(trainer: Trainer) -> int:
    """So many images that a step takes STEP_SECONDS; at most those of the recipe."""
    few = max(FEW_IMAGES, trainer.recipe.grad_accum_steps)
    step, _ = _work(trainer, few)
    seconds = min(_seconds(step, 1, trainer.world.device) for _ in range(2))
    return max(few, min(trainer.recipe.batch_size, int(few * STEP_SECONDS / seconds)))


def _measure(trainer: Trainer, batch_size: int) -> Speed:
    training, evaluation = (
        [batch_size / seconds for seconds in _rounds(work, trainer.world.device)]
        for work in _work(trainer, batch_size)
    )
    return Speed(
        batch_size=batch_size,
        training=median(training),
        slowest=min(training),
        fastest=max(training),
        evaluation=median(evaluation),
        macs=count_macs(trainer.module.model, trainer.config.model.image_size).total,
    )


def _work(trainer: Trainer, batch_size: int) -> tuple[Work, Work]:
    """A training step and the evaluation of a batch."""
    device, size = trainer.world.device, trainer.config.model.image_size
    images = torch.randint(256, (batch_size, 3, size, size), dtype=torch.uint8, device=device)
    targets = torch.arange(batch_size, device=device) % len(trainer.classes)

    def step() -> None:
        trainer.train_step(images, targets, batch_size)
        trainer.step += 1

    def evaluation() -> None:
        batches, normalize = [[images, targets]], trainer.update.inputs.normalize
        evaluate(trainer.module, normalize, batches, trainer.world, trainer.recipe.precision)

    return step, evaluation


def _rounds(work: Work, device: torch.device) -> list[float]:
    """Seconds of one call, warm, in each of ROUNDS."""
    once = min(_seconds(work, 1, device) for _ in range(2))
    calls = math.ceil(ROUND_SECONDS / once)
    return [_seconds(work, calls, device) / calls for _ in range(ROUNDS)]


def _seconds(work: Work, calls: int, device: torch.device) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
