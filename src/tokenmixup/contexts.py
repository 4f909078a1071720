"""Changes to the behaviour of stock modules for one forward pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

Forward = Callable[..., Any]


@contextmanager
def replaced_forwards(forwards: Sequence[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Replaces `module.forward` on each instance."""
    before = [(module, vars(module).get("forward")) for module, _ in forwards]
    try:
        for module, forward in forwards:
            module.forward = forward
        yield
    finally:
        for module, own in before:
            if own is not None:
                module.forward = own
            elif "forward" in vars(module):
                del module.forward


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
