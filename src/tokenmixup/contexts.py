"""Changes to the behaviour of stock modules for one forward pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

Forward = Callable[..., Any]


@contextmanager
def replaced_forwards(forwards: Sequence[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Replaces `module.forward` on each instance, then restores what was there."""
    before = [(module, vars(module).get("forward")) for module, _ in forwards]
    for module, forward in forwards:
        setattr(module, "forward", forward)
    try:
        yield
    finally:
        for module, own in before:
            if own is None:
                del module.forward
            else:
                setattr(module, "forward", own)


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
