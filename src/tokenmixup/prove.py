"""Which blocks are tried out before they train, and when again.

A block may consist of anything, so what `watch.py` assumes of it is proved by trial, as the
properties of `trial.py`: once, and again when the block or what it gets is no longer what it was.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenmixup.adapters import is_sharded
from tokenmixup.block import BlockInput, Plan, check_tokens
from tokenmixup.contexts import evaluating, own_generators
from tokenmixup.trial import prove_block

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
TRIED_IMAGES = 3  # of the plain pass
NOT_PROVED = "TokenMixup proves nothing of blocks under fully_shard: train a batch before sharding"


@dataclass(eq=False)
class Proof:
    """What a block was when it was proved; as anything else it must be proved again."""

    state: list[Any]
    can_run: bool  # else nothing is proved of it
    # of the arguments beside the tokens for which it was proved; None: not proved yet
    kinds: tuple[Any, Any] | None = None


class Proofs:
    """What has been proved of the blocks that a module touches."""

    def __init__(self) -> None:
        self.by_block: dict[int, Proof] = {}  # by the index of the block

    def prove(self, model: nn.Module, plans: Mapping[int, Plan], images: Tensor) -> None:
        """Proves what has not been proved of the blocks as they are now.

        Raises ValueError for a block of which a property does not hold.
        """
        states = {index: state_of(plan, images) for index, plan in plans.items()}
        old = [index for index, proof in self.by_block.items() if proof.state != states.get(index)]
        for index in old:  # or not touched any more
            del self.by_block[index]
        new = [plan for index, plan in plans.items() if index not in self.by_block]
        for plan in new:
            check_parts(plan)
        tried = [plan for plan in new if plan.tried is not None]
        can_run = bool(tried) and can_run_apart(model, images)
        entries: dict[int, BlockInput] = {}
        if can_run:
            entries = inputs_of(model, images, tried)
        for plan in new:
            proof = Proof(states[plan.index], can_run)
            entry = entries.get(plan.index)
            if entry is not None:  # else the plain model leaves it out: `check` proves it
                prove_block(plan, entry)
                proof.kinds = kinds_beside_tokens(entry)
            self.by_block[plan.index] = proof

    def check(self, plan: Plan, entry: BlockInput) -> None:
        """Proves a block that gets other arguments than those for which it has been proved."""
        proof = self.by_block[plan.index]
        if plan.tried is None or not proof.can_run:
            return
        kinds = kinds_beside_tokens(entry)
        if proof.kinds == kinds:
            return
        if torch.compiler.is_compiling():
            told = "compiled, it gets other arguments than in evaluation: compile after one batch"
            raise ValueError(f"{plan.name}: {told}")
        prove_block(plan, entry)
        proof.kinds = kinds


def can_run_apart(model: nn.Module, images: Tensor) -> bool:
    """Whether blocks can be run by themselves: not on a meta device, nor under FSDP.

    FSDP gathers their parameters for one pass of the whole model.
    """
    if is_sharded(model):
        warnings.warn(NOT_PROVED, stacklevel=2)
        return False
    return images.device.type != "meta"


def state_of(plan: Plan, images: Tensor) -> list[Any]:
    """Returns what a proof holds for: any part of a block may be replaced at any time."""
    has_memory = plan.vtm is not None
    state: list[Any] = [plan.adapter, plan.tried, has_memory, images.dtype, images.device]
    for part in plan.block.modules():
        state += [part, part.forward]
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


def kinds_beside_tokens(entry: BlockInput) -> tuple[Any, Any]:
    """Returns the kinds of the further arguments, and of those by name."""
    return kinds_of(entry.args[1:]), kinds_of(entry.kwargs)


def check_parts(plan: Plan) -> None:
    """Raises ValueError for a scripted block, and for a batch norm in a block of HTM or VTM."""
    if isinstance(plan.block, torch.jit.ScriptModule):
        raise ValueError(f"{plan.name} is TorchScript, whose attention nobody sees")
    if plan.htm is None and plan.vtm is None:
        return
    for part in plan.block.modules():
        if isinstance(part, BATCH_NORMS):
            kind = type(part).__name__
            raise ValueError(f"{plan.name} has a {kind}, whose statistics would see tokens twice")


def inputs_of(model: nn.Module, images: Tensor, plans: Sequence[Plan]) -> dict[int, BlockInput]:
    """Runs the plain model on a few of the images. Returns what enters those blocks that it calls.

    Raises ValueError for a block that gets no tokens first.
    """
    entries: dict[int, BlockInput] = {}

    def record(plan: Plan, block: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        check_tokens(plan, args, TRIED_IMAGES)
        entry = BlockInput(args, kwargs, plan.adapter, blocks=plan.blocks, name=plan.name)
        if entry.num_tokens > plan.adapter.num_prefix_tokens:
            entries[plan.index] = entry

    index = torch.arange(TRIED_IMAGES, device=images.device) % len(images)
    few = images[index].nan_to_num()
    with ExitStack() as stack:
        for plan in plans:
            hook = partial(record, plan)
            stack.enter_context(plan.block.register_forward_pre_hook(hook, with_kwargs=True))
        stack.enter_context(torch.no_grad())
        stack.enter_context(evaluating(model))
        stack.enter_context(own_generators(images.device))
        model(few)
    torch.clear_autocast_cache()  # of weights that were cast without gradients
    return entries
