"""Evaluation mode, no autocast and generators of one's own, for a while."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Sets evaluation mode, then restores the mode of every submodule."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Disables autocast. On a meta device, which has none, does nothing."""
    if device_type == "meta":
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


@contextmanager
def own_generators(device: torch.device) -> Iterator[Callable[[], None]]:
    """Restores the generators of the host and a device afterwards. What it yields seeds them."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    states = [generator.get_state() for generator in generators]

    def seed() -> None:
        for generator in generators:
            generator.manual_seed(0)

    try:
        yield seed
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
