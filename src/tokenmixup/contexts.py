"""Changes to the behaviour of stock modules for one forward pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

Forward = Callable[..., Any]


@torch.compiler.disable
def replace_forwards(
    forwards: Sequence[tuple[nn.Module, Forward | None]],
) -> list[tuple[nn.Module, Forward | None]]:
    """Replaces `module.forward` on each instance; None: by that of its class.

    Returns what undoes it.
    """
    before = [(module, vars(module).get("forward")) for module, _ in forwards]
    for module, forward in forwards:
        if forward is None:
            del module.forward
        else:
            setattr(module, "forward", forward)
    return before


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
