"""torch.compile of the blocks, for training passes alone.

What TokenMixup does between the blocks, the assignment on the host above all, stays outside: its
hooks run around a block's `forward`. No compiled part sees how many samples are easy, and each is
compiled once for every batch size; those of an epoch differ by one image.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from reproduction.system.errors import UserError, first_line
from tokenmixup import TokenMixup

# Dropout is drawn as without compiling, and no kernel depends on the batches before.
COMPILER: Callable[..., Any] = partial(
    torch.compile, dynamic=False, options={"fallback_random": True}
)


BATCH_SIZES = 4  # at most, in a run: of whole batches and the last one, and of their micro-batches


def compile_blocks(module: TokenMixup) -> None:
    """Compiles in place what runs unchanged in a training pass; nothing is built before the first.

    Parameters, their names and evaluation stay as they are. All blocks share one limit of torch's,
    beyond which it silently compiles no more; it is raised to what they need, as each has a rate of
    stochastic depth of its own.
    """
    from torch._dynamo import config  # a second, which other runs save

    parts = [*_unchanged_parts(module)]
    config.recompile_limit = max(config.recompile_limit, BATCH_SIZES * len(parts))
    for part in parts:
        # bound to the part, so that the forward pass of a copy is the copy's own
        setattr(part, "forward", MethodType(_compiled_in_training(type(part).forward), part))


def _unchanged_parts(module: TokenMixup) -> Iterator[nn.Module]:
    """All blocks, but only the MLP of those whose attention is replaced."""
    model: Any = module.model
    replaced = module.replaced_attention()
    for index, block in enumerate(model.blocks):
        yield block.mlp if index in replaced else block


def _compiled_in_training(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A module's `forward`, compiled while it trains, as it is in evaluation."""
    compiled = COMPILER(forward)

    @wraps(forward)
    def run(part: nn.Module, *args: Any, **given: Any) -> Tensor:
        return (compiled if part.training else forward)(part, *args, **given)

    return run


@cache
def check_compiler(device: str) -> None:
    """Builds a sum; UserError if torch.compile cannot work here."""
    try:
        COMPILER(lambda x: x + 1)(torch.ones(2, device=device))
    except Exception as error:  # of Triton, of the C++ compiler, of an old GPU
        reason = first_line(getattr(error, "inner_exception", error))
        needs = "Triton and a C compiler" if device == "cuda" else "a C++ compiler"
        raise UserError(
            f"compile=true: does not work on this machine, where torch needs {needs} for "
            f"{device} ({reason}); allowed is false"
        ) from error
