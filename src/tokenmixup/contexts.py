"""Context managers that change the behaviour of a stock module for one forward pass."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """Replaces `module.forward` on the instance."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


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
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)
