"""When a block is tried out: as it first trains, and again when it or what it gets is another.

A block may consist of anything, so what `watch.py` assumes of it is proved by trial, as the
properties of `trial.py`.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from tokenmixup.adapters import is_sharded
from tokenmixup.block import BlockInput, Plan
from tokenmixup.trial import dtype_of, prove_block
from tokenmixup.watch import Sight

STREAM = "a second stream of the samples' tokens is not mixed"
# of each module of a block: what a proof holds for
PROVED = attrgetter("__class__", "forward", "_modules", "_forward_pre_hooks", "_forward_hooks")
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
NOT_PROVED = "TokenMixup proves nothing of blocks under fully_shard: train a batch before sharding"
COMPILED = "compiled, it gets arguments for which it is not proved: train an uncompiled batch first"

# what proofs have found out, by the index of the block and the kinds of its arguments
Sights = dict[Any, Sight]


def with_sight(sights: Sights, entry: BlockInput) -> BlockInput:
    """Returns the input of a block with what its proof has found out; a new kind is proved now."""
    plan = entry.plan
    key = (plan.index, kinds_of(entry.args[1:]), kinds_of(entry.kwargs))
    if key not in sights and torch.compiler.is_compiling():
        if plan.proved_by is None:
            return entry
        raise ValueError(f"{plan.name}: {COMPILED}")
    if key not in sights:
        check_one_stream(entry)
        sights[key] = Sight() if plan.proved_by is None else prove_block(plan, entry)
    return replace(entry, sight=sights[key])


def check_one_stream(entry: BlockInput) -> None:
    """Raises ValueError for further tokens of each sample at a layer that mixes its own.

    They would stay as they are.
    """
    if not entry.plan.is_mixed or entry.tokens.is_meta:
        return
    b, n, d = entry.flat_tokens.shape
    for x in tree_leaves([entry.args[1:], entry.kwargs]):
        if not isinstance(x, Tensor) or x.ndim < 3 or x.shape[:2] != (b, n):
            continue
        is_mask = x.dtype == torch.bool or (x.shape[-1] == n and x.shape != (b, n, d))  # b n n
        if not is_mask and not torch.equal(x, x[:1].expand_as(x)):
            raise ValueError(f"{entry.name}: gets {list(x.shape)} beside its tokens: {STREAM}")


def are_proved(plans: Mapping[int, Plan], sights: Sights) -> bool:
    """Whether each block has been proved, for some arguments."""
    known = {index for index, *_ in sights}
    return all(index in known for index, plan in plans.items() if plan.proved_by is not None)


def can_run_alone(model: nn.Module, device: torch.device) -> bool:
    """Whether blocks can be run by themselves: not on a meta device, nor under FSDP.

    FSDP gathers their parameters for one pass of the whole model; a warning tells it.
    """
    if is_sharded(model):
        warnings.warn(NOT_PROVED, stacklevel=2)
        return False
    return device.type != "meta"


def modules_of(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the modules of blocks which can become others; what is scripted cannot."""
    modules = [module for block in blocks for module in block.modules()]
    return [x for x in modules if not isinstance(x, torch.jit.ScriptModule)]


def state_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Returns what a proof holds for: any module of a block may be replaced at any time."""
    return [(kind, run, *map(dict, held)) for kind, run, *held in map(PROVED, modules)]


def is_unchanged(modules: Iterable[nn.Module], state: Sequence[Any]) -> bool:
    """Whether `state_of` modules is still the same; every pass waits for the answer."""
    return [*map(PROVED, modules)] == state


def kinds_of(given: Any) -> Any:
    """Returns what tells arguments of one kind from others, whatever the size of the batch."""
    if isinstance(given, Tensor):
        return given.ndim, given.is_floating_point()
    if isinstance(given, tuple | list):
        return tuple(kinds_of(x) for x in given)
    if isinstance(given, Mapping):
        return tuple((name, kinds_of(x)) for name, x in given.items())
    if given is None or isinstance(given, bool | str):
        return given
    return type(given)


def mode_of(modules: Sequence[nn.Module], images: Tensor) -> Any:
    """Returns how the modules of blocks are to train."""
    modes = tuple(map(attrgetter("training"), modules))
    is_single = len(images) == 1  # there are no others, of which it could be independent
    return modes, is_single, torch.is_grad_enabled(), dtype_of(images)


def check_block(plan: Plan) -> None:
    """Raises ValueError for a block that is scripted or has a lazy layer.

    And for a batch norm in a block of HTM or VTM.
    """
    if isinstance(plan.block, torch.jit.ScriptModule):
        raise ValueError(f"{plan.name} is TorchScript, whose attention nobody sees")
    if any(map(is_lazy, plan.block.parameters())):
        raise ValueError(f"{plan.name} has a lazy layer: run the model once in evaluation first")
    if plan.htm is None and plan.vtm is None:
        return
    for part in plan.block.modules():
        if isinstance(part, BATCH_NORMS):
            kind = type(part).__name__
            raise ValueError(f"{plan.name} has a {kind}, whose statistics would see tokens twice")
