"""Contexts in which a stock module behaves differently for the length of one forward pass."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """Lets `forward` stand in for the module's own, which its class keeps."""
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
    """Evaluation mode, without dropout and stochastic depth; each submodule gets its own back."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Every operation in the precision of its arguments. A meta device knows no autocast."""
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)
