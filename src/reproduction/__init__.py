"""The experiments of the TokenMixup paper: configuration, data, models, training and reports.

Its functions import torch when they are called, so that a refused command does not.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from reproduction.training.checkpoint import Trained
    from reproduction.training.ranks import World
    from reproduction.training.step import MicroBatch, Trainer


def load_run(folder: str | Path, weights: str = "last") -> "Trained":
    """Returns the plain model of a run, its transform and classes, see `checkpoint.load_run`."""
    from reproduction.training import checkpoint

    return checkpoint.load_run(folder, weights)


def build_trainer(
    overrides: Sequence[str],
    num_classes: int = 10,
    steps_per_epoch: int = 1,
    world: "World | None" = None,
) -> "Trainer":
    """Returns the trainer of a train.py command line, without data, run folder and checkpoint."""
    import torch

    from reproduction.data.inputs import build_training_inputs
    from reproduction.models.build import build_module, place, without_weights
    from reproduction.start import compose
    from reproduction.training.ranks import World, resolve_device
    from reproduction.training.step import Trainer

    config = compose(tuple(overrides))
    world = world or World(0, 1, torch.device(resolve_device(config.device, 1)))
    torch.manual_seed(config.seed)
    module = build_module(without_weights(config.model), config.augmentation, num_classes)
    return Trainer(
        config,
        world,
        module=place(module, world.device).train(),
        classes=[str(label) for label in range(num_classes)],
        inputs=build_training_inputs(config, world.device),
        steps_per_epoch=steps_per_epoch,
    )


class Step(NamedTuple):
    """A training step: what it has computed, and the trainer, whose weights it has updated."""

    losses: list[float]  # of each micro-batch
    gradients: dict[str, "Tensor"]  # as the optimiser got them, by the names of `trainer.module`
    lr: float
    parts: list["MicroBatch"]  # loss, output and the scalars of the log
    trainer: "Trainer"


def step(
    overrides: "Sequence[str] | Trainer", images: "Tensor", classes: "Tensor", num_classes: int = 10
) -> Step:
    """Trains one step of the schedule on images (`b 3 h w`, uint8) and their classes (`b`).

    `overrides` are those of a train.py command line, whose model and optimiser are new; or the
    trainer of an earlier step, or of `build_trainer`, which takes its next step. There are no
    gradients if float16's scaler skips the update, or in the replay of a CUDA graph.
    """
    from reproduction.training.step import Trainer

    trainer = overrides
    if not isinstance(trainer, Trainer):
        trainer = build_trainer(trainer, num_classes)
    gradients: dict[str, Tensor] = {}

    def keep(optimizer: Any, *_: Any) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # of a scaler, unless they are clipped
        for name, parameter in trainer.module.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad / (1 if scale is None else scale)

    handle = trainer.optimizer.register_step_pre_hook(keep)
    try:
        parts = trainer.train_step(images, classes, len(images))
    finally:
        handle.remove()
    return Step([float(part.loss) for part in parts], gradients, trainer.lr, parts, trainer)
