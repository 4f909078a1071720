"""Which blocks are tried out as they first train, and when again.

A block may consist of anything, so what `watch.py` assumes of it is proved by trial, as the
properties of `trial.py`: once, and again when the block or what it gets is no longer what it was.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tokenmixup.adapters import is_sharded
from tokenmixup.block import BlockInput, Plan
from tokenmixup.trial import dtype_of, prove_block
from tokenmixup.watch import Sight

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
NOT_PROVED = "TokenMixup proves nothing of blocks under fully_shard: train a batch before sharding"
COMPILED = "compiled, it gets arguments for which it is not proved: train an uncompiled batch first"


@dataclass(eq=False)
class Proof:
    """What a block is; as another one it must be proved again."""

    state: list[Any]
    is_due: bool  # else nothing is to be proved of it, or nothing can be
    # what was found out about it: for each kind of its arguments, in all modes of training
    by_mode: dict[Any, list[tuple[Any, Sight]]] = field(default_factory=dict)
    found: list[tuple[Any, Sight]] = field(default_factory=list)  # in the present mode


class Proofs:
    """What has been proved of the blocks that a module touches."""

    def __init__(self) -> None:
        self.by_block: dict[int, Proof] = {}  # by the index of the block

    def look(self, model: nn.Module, plans: Mapping[int, Plan], images: Tensor) -> bool:
        """Forgets what has been proved of blocks that are others now.

        Returns whether any is still to be proved. Raises ValueError for parts that cannot serve.
        """
        parts = {index: list(plan.block.modules()) for index, plan in plans.items()}
        states = {i: state_of(plan, parts[i], images) for i, plan in plans.items()}
        kept = {i: proof for i, proof in self.by_block.items() if proof.state == states.get(i)}
        new = [plan for index, plan in plans.items() if index not in kept]
        for plan in new:
            check_parts(plan)
        can_run = any(plan.tried for plan in new) and can_run_apart(model, images)
        for plan in new:
            is_due = can_run and plan.tried is not None
            kept[plan.index] = Proof(states[plan.index], is_due)
        due = {index: proof for index, proof in kept.items() if proof.is_due}
        for index, proof in due.items():
            proof.found = proof.by_mode.setdefault(mode_of(parts[index], images), [])
        self.by_block = kept
        return not all(proof.found for proof in due.values())

    def proved(self, plan: Plan, entry: BlockInput) -> BlockInput:
        """Returns the input with what is known of the block, which is proved if that is due."""
        proof = self.by_block[plan.index]
        if not proof.is_due:
            return entry
        kind = [kinds_of(entry.args[1:]), kinds_of(entry.kwargs)]
        for known, sight in proof.found:
            if known == kind:
                return replace(entry, sight=sight)
        if torch.compiler.is_compiling():
            raise ValueError(f"{plan.name}: {COMPILED}")
        sight = prove_block(plan, entry)
        proof.found.append((kind, sight))
        return replace(entry, sight=sight)


def can_run_apart(model: nn.Module, images: Tensor) -> bool:
    """Whether blocks can be run by themselves: not on a meta device, nor under FSDP.

    FSDP gathers their parameters for one pass of the whole model.
    """
    if is_sharded(model):
        warnings.warn(NOT_PROVED, stacklevel=2)
        return False
    return images.device.type != "meta"


def state_of(plan: Plan, parts: Sequence[nn.Module], images: Tensor) -> list[Any]:
    """Returns what a proof holds for: any part of a block may be replaced at any time."""
    has_memory = plan.vtm is not None
    state: list[Any] = [plan.adapter, plan.tried, has_memory, images.dtype, images.device]
    for part in parts:
        state += [part, type(part), part.forward]
        state += part._forward_pre_hooks.values()
        state += part._forward_hooks.values()
    return state


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


def mode_of(parts: Sequence[nn.Module], images: Tensor) -> Any:
    """Returns how a block is to train."""
    modes = tuple(part.training for part in parts)
    is_single = len(images) == 1  # there are no others, of which it could be independent
    return modes, is_single, torch.is_grad_enabled(), dtype_of(images)


def check_parts(plan: Plan) -> None:
    """Raises ValueError for a scripted block, and for a batch norm in a block of HTM or VTM."""
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
