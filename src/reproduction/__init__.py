"""The experiments of the TokenMixup paper: configuration, data, models, training and reports.

Its functions import torch when they are called, so that a refused command does not.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reproduction.training.checkpoint import Trained
    from reproduction.training.step import Trainer


def load_run(folder: str | Path, weights: str = "last") -> "Trained":
    """Returns the plain model of a run, its transform and classes, see `checkpoint.load_run`."""
    from reproduction.training import checkpoint

    return checkpoint.load_run(folder, weights)


def build_trainer(overrides: Sequence[str], num_classes: int = 10) -> "Trainer":
    """Returns the trainer of a train.py command line, without data, run folder and checkpoint."""
    import torch

    from reproduction.models.build import build_module, without_weights
    from reproduction.start import compose
    from reproduction.training.ranks import World, resolve_device
    from reproduction.training.step import Trainer

    config = compose(tuple(overrides))
    world = World(0, 1, torch.device(resolve_device(config.device, 1)))
    torch.manual_seed(config.seed)
    module = build_module(without_weights(config.model), config.augmentation, num_classes)
    classes = [str(label) for label in range(num_classes)]
    return Trainer(config, world, module, classes, steps_per_epoch=1)
