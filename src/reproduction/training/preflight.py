"""Checks of a run before anything is written."""

import torch
from torch import nn

from reproduction.config import Config, ViT
from reproduction.data.images import NO_IMAGE
from reproduction.data.loaders import TrainingBatches, build_training_images
from reproduction.data.sources import opened
from reproduction.models.build import (
    build_module,
    check_compiler,
    count_parameters,
    load_initial_weights,
    without_weights,
)
from reproduction.models.library import timm_name
from reproduction.system.errors import UserError, first_line
from reproduction.system.ranks import is_first_rank
from reproduction.training.distributed import resolve_device
from reproduction.training.labels import last_block

MOST_PARAMETERS = 10**10


def preflight(config: Config, here: bool = True) -> None:
    """Raises UserError if the run cannot start; writes nothing but downloaded data.

    Checks the devices only if the run is to start on this machine.
    """
    if not is_first_rank():
        return
    if here:
        device = resolve_device(config.device, config.devices, config.recipe.precision)
        if config.compile == "cuda-graph" and device == "cpu":
            raise UserError("compile=cuda-graph: needs a GPU, allowed are false and true")
        if config.compile:
            check_compiler(device)
    source = opened(config.dataset)
    images = build_training_images(config, source.train)
    try:
        images[(0, 0)]
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error) if NO_IMAGE in str(error) else first_line(error)
        raise UserError(f"the first training image: {reason}") from error
    batches = TrainingBatches(
        len(source.train), config.recipe.batch_size, config.seed, ranks=config.devices
    )
    if isinstance(config.model, ViT):
        timm_name(config.model.architecture, config.model.pretrained)
    with torch.device("meta"):
        module = build_module(
            without_weights(config.model), config.augmentation, len(source.classes)
        )
    _check_size(module, config)
    cutmix = config.augmentation.cutmix
    if cutmix is not None and cutmix.labels == "attention":
        last_block(module.model)
    load_initial_weights(config.model, module.model)
    fewest = batches.global_size(len(batches) - 1) // config.devices
    _check_micro_batches(fewest, module.model, config)


def _check_size(module: nn.Module, config: Config) -> None:
    """Raises UserError if the model is too large for any machine."""
    parameters = count_parameters(module)
    if parameters > MOST_PARAMETERS:
        raise UserError(
            f"model={config.model.name}: has {parameters:,} parameters with these settings, "
            f"allowed are {MOST_PARAMETERS:,}"
        )


def _check_micro_batches(images: int, model: nn.Module, config: Config) -> None:
    """Raises UserError if a rank's smallest share, `images`, is too small for its micro-batches."""
    count = config.recipe.grad_accum_steps
    if images < count:
        raise UserError(
            f"recipe.grad_accum_steps={count}: some batches leave {images} images to a rank, "
            f"allowed is 1..{images}"
        )
    if images // count > 1:
        return
    size = config.model.image_size
    try:  # batch normalisation refuses a single value
        model.train()(torch.zeros(1, 3, size, size, device="meta"))
    except ValueError as error:
        raise UserError(
            f"recipe.batch_size={config.recipe.batch_size}: some passes get one image, "
            f"which {config.model.name} cannot train on ({first_line(error)})"
        ) from error
