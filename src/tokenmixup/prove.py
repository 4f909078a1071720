"""Which blocks are to be proved before they train: what watching assumes of them (see `watch.py`).

A block may consist of anything, so what it is assumed to do is tried out, as the properties of
`trial.py`: once, and again when the block or what it gets is no longer what it was.
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
FEW = 3  # images of the plain pass
NOT_PROVED = "TokenMixup proves nothing of blocks under fully_shard: train one batch before"


@dataclass(eq=False)
class Proof:
    """What a block was when it was proved; as anything else it must be proved again."""

    state: list[Any]
    can_run: bool  # else nothing is proved of it
    kinds: tuple[Any, Any] | None = None  # of its further arguments; None: of none yet


class Proofs:
    """What has been proved of the blocks that a module touches."""

    def __init__(self) -> None:
        self.of: dict[int, Proof] = {}  # by the index of the block

    def forget_others(self, plans: Mapping[int, Plan]) -> None:
        """Keeps no block alive that is not touched any more."""
        self.of = {index: proof for index, proof in self.of.items() if index in plans}

    def prove(self, model: nn.Module, plans: Mapping[int, Plan], images: Tensor) -> None:
        """Proves what has not been proved of the blocks as they are now.

        Raises ValueError for a block of which a property does not hold.
        """
        new = [plan for plan in plans.values() if self._is_new(plan, images)]
        for plan in new:
            check_parts(plan)
        readable = [plan for plan in new if plan.reader is not None]
        can_run = bool(readable) and can_run_apart(model, images)
        entries: dict[int, BlockInput] = {}
        if can_run:
            entries = inputs_of(model, images, readable)
        for plan in new:
            proof = Proof(state_of(plan, images), can_run)
            entry = entries.get(plan.index)
            if entry is not None:  # else the plain model leaves it out: `check` proves it
                prove_block(plan, entry)
                proof.kinds = kinds_beside_tokens(entry)
            self.of[plan.index] = proof

    def _is_new(self, plan: Plan, images: Tensor) -> bool:
        proof = self.of.get(plan.index)
        return proof is None or proof.state != state_of(plan, images)

    def check(self, plan: Plan, entry: BlockInput) -> None:
        """Proves a block that gets other arguments than those for which it has been proved."""
        proof = self.of[plan.index]
        if plan.reader is None or not proof.can_run:
            return
        kinds = kinds_beside_tokens(entry)
        if proof.kinds == kinds:
            return
        if torch.compiler.is_compiling():
            told = "compiled, it gets other arguments than in evaluation: train one batch before"
            raise ValueError(f"{plan.name}: {told}")
        prove_block(plan, entry)
        proof.kinds = kinds


def can_run_apart(model: nn.Module, images: Tensor) -> bool:
    """Whether blocks can be run by themselves: not on a meta device, nor under FSDP.

    It gathers their parameters for one pass.
    """
    if is_sharded(model):
        warnings.warn(NOT_PROVED, stacklevel=2)
        return False
    return images.device.type != "meta"


def state_of(plan: Plan, images: Tensor) -> list[Any]:
    """Returns what a proof holds for: any part of a block may be replaced at any time."""
    state: list[Any] = [plan.adapter, plan.reader, plan.vtm is None, images.dtype, images.device]
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
    """Raises ValueError for a scripted block, and for a batch norm in one of HTM or VTM."""
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
        check_tokens(plan, args, FEW)
        entry = BlockInput(args, kwargs, plan.adapter, blocks=plan.blocks, name=plan.name)
        if entry.num_tokens > plan.adapter.num_prefix_tokens:
            entries[plan.index] = entry

    few = images[torch.arange(FEW, device=images.device) % len(images)].nan_to_num()
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
