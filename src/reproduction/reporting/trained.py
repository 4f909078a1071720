"""A trained run's model, and what enters its blocks.

Letters: b batch, n tokens with prefix, d width, h w image.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reproduction.config import Config
from reproduction.data.sources import Source, load_source
from reproduction.models.build import build_module, without_start
from reproduction.models.weights import read_file
from tokenmixup import TokenMixup
from tokenmixup.detectors import BlockInput
from tokenmixup.structure import declared_prefix, has_class_token


def load_trained(config: Config, last_checkpoint: Path) -> tuple[TokenMixup, Source]:
    """The module of a run as it was left, without manifold mixup: whole images are looked at.

    The model is in evaluation mode. UserError if the checkpoint or the data cannot be read.
    """
    source = load_source(config.dataset.name, config.dataset.root, config.dataset.limit)
    stack = dataclasses.replace(config.augmentation, manifold_mixup=None)
    module = build_module(without_start(config.model), stack, len(source.classes))
    module.load_state_dict(read_file(f"checkpoint={last_checkpoint}", last_checkpoint)["module"])
    module.model.eval()
    return module, source


@torch.no_grad()
def block_inputs(model: Any, images: Tensor) -> list[BlockInput]:
    """What enters each block of the plain model for `images`, `b 3 h w`."""
    seen: list[BlockInput] = []
    prefix = declared_prefix(model)
    with_class_token = prefix > 0 and has_class_token(model)

    def note(block: nn.Module, args: tuple[Tensor], given: dict[str, Any]) -> None:
        seen.append(BlockInput(model.blocks, len(seen), args[0], given, prefix, with_class_token))

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in model.blocks]
    try:
        model(images)
    finally:
        for handle in handles:
            handle.remove()
    return seen
