"""What HTM and VTM ask of a block, as far as it is checked: once, before its first training pass.

Letters: b batch, n tokens with prefix, m memory.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.random import fork_rng

from tokenmixup.block import BlockInput, Plan, attended_of_memory, input_of, run_watched
from tokenmixup.contexts import evaluating
from tokenmixup.vertical import Memory

TOLERANCE = 1e-3  # of the largest value; rounding is 1e-6, or 5e-4 in TF32
ROUNDINGS = 8  # of values of the keys' dtype, which are allowed where that is more
ALONE = (
    "for VTM, keys and values of its tokens must not depend on the tokens beside them, nor on "
    "their places but by rope=, one tensor"
)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)


def check_block(plan: Plan) -> None:
    """Raises ValueError for a block of HTM or VTM that has a batch norm."""
    if plan.htm is None and plan.vtm is None:
        return
    for part in plan.block.modules():
        if isinstance(part, BATCH_NORMS):
            norm = type(part).__name__
            raise ValueError(f"{plan.name} has a {norm}, whose statistics would see tokens twice")


def check_model(model: nn.Module, plans: Iterable[Plan], images: Tensor) -> None:
    """Runs a model once, in evaluation: counts tokens, and checks keys and values for VTM.

    Until a batch has been finite, which alone can show them. With gradients, as in training:
    autocast and `parametrize.cached()` keep weights for later.
    """
    hooks = [
        plan.block.register_forward_pre_hook(partial(_check, plan, images), with_kwargs=True)
        for plan in plans
    ]
    devices = [images.device] if images.is_cuda else []
    try:
        with evaluating(model), fork_rng(devices):
            model(images)
    finally:
        for hook in hooks:
            hook.remove()


def _check(
    plan: Plan, images: Tensor, block: nn.Module, args: tuple[Any, ...], kwargs: Any
) -> None:
    """Notes the number of tokens, which must be that of training; checks a block of VTM."""
    block_input = input_of(plan, args, kwargs)
    if plan.vtm is not None:
        _check_keys(plan, block_input)
    is_broken = (~block_input.tokens.isfinite()).any()
    if not is_broken:
        plan.evaluated = (*images.shape[2:], block_input.num_tokens)


def _check_keys(plan: Plan, block_input: BlockInput) -> None:
    """Raises ValueError unless tokens have the same keys and values alone as beside the others."""
    x = block_input.tokens
    prefix = plan.adapter.num_prefix_tokens
    # every other token, from the last on
    last = torch.arange(block_input.num_tokens - 1, prefix - 1, -2, device=x.device)
    indices = last.expand(len(x), -1)
    _, watching = run_watched(block_input, ends=True)
    own = watching.fused()
    tolerance = max(TOLERANCE, ROUNDINGS * torch.finfo(own[0].dtype).eps)
    alone, _ = attended_of_memory(block_input, Memory(x[:, last], indices))
    pairs = zip(alone, (each[..., last, :] for each in own), strict=True)
    differ = [(a - b).abs().max() > tolerance * b.abs().max() for a, b in pairs]
    if any(differ):
        raise ValueError(f"{plan.name}: {ALONE}")
