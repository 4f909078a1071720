"""Evaluation mode and no autocast, for a while."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Sets evaluation mode, then restores the mode of every submodule.

    By their flags: `eval()` may do more, such as merge low-rank weights into others.
    """
    modes = [(part, part.training) for part in module.modules()]
    for part, _ in modes:
        part.training = False
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
