"""Contexts of a pass, and the private names of torch that have no public one."""

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


def backward_without_autocast() -> AbstractContextManager[Any]:
    """Lets a compiler trace the backward pass without autocast, as eager mode runs it.

    It would trace it under the autocast of the call otherwise, and ScoreNet's gradients would lose
    the precision of its parameters. Torch has no public name for this.
    """
    from torch._functorch import config

    patched: AbstractContextManager[Any] = config.patch("backward_pass_autocast", "off")
    return patched


Autograd = tuple[bool, Any]  # whether it records operations, and the checkpoint around them


def autograd_now() -> Autograd:
    """Returns the state of autograd, which is another one within a gradient checkpoint.

    Of checkpoints it sees those of torch that are not reentrant: by the hooks that they put around
    saved tensors, for which torch has no public name.
    """
    is_recorded = torch.is_grad_enabled()
    if torch.compiler.is_compiling():  # compiled, a rerun is right
        return is_recorded, None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or hooks[0].__module__ != "torch.utils.checkpoint":
        return is_recorded, None
    return is_recorded, hooks[0]
