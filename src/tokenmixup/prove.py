"""Proves of a block, before it first trains, what watching assumes of it (see `watch.py`).

A block may consist of anything, so what it is assumed to do is tried out, as properties:

    samples   what is seen of a sample does not depend on the other samples
    map       in an attention map, a token has a row, in which it asks, and a column, in which it is
              asked: another token at its place changes these two, and little else
    memory    of VTM, which appends tokens to a block's own (Eq. 13):
      hidden    tokens that nobody sees change nothing: beside its attention, a block works token
                by token
      places    copies of tokens are attended to as these are: positions and masks are theirs
      twice     if each token is there twice, what the block returns is the same: softmax over
                twice the keys gives each half, so the values arrive

A block runs on random tokens with arguments of the plain model, in float32 and without gradients.
Its parameters are drawn around its own, since a gate that begins at 0 would hide what it gates.

Letters: b batch, h heads, n tokens with prefix, t spatial tokens, d width, m memory.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenmixup.adapters import is_sharded
from tokenmixup.block import BlockInput, Memory, Plan, check_tokens, run_watched, tokens_of
from tokenmixup.contexts import evaluating, own_generators, without_autocast
from tokenmixup.saliency import map_of

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
FEW = 3  # images of the plain pass
COPIES = 4  # tokens of a memory
TOLERANCE = 1e-3  # of the largest value; rounding is 1e-6, or 5e-4 in TF32
AGAIN = 8  # runs that show whether a block draws from a generator of its own
SHARE = 0.5  # what another token may change elsewhere, of what it changes in its row and column
LEAST = 4  # tokens of which a map can be told from its shape
UNSEEN, UNPROVED = "unseen", "unproved"  # in the place of the kinds of arguments
NOT_PROVED = "TokenMixup proves nothing of blocks under fully_shard: train one batch before"


@dataclass(eq=False)
class Proof:
    """What a block was when it was proved; as anything else it must be proved again."""

    state: list[Any]
    kinds: Any  # of its further arguments


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
        readable = [plan for plan in new if plan.reader is not None]
        entries, kinds = dict[int, BlockInput](), UNSEEN  # such a block is proved where it runs
        for plan in new:
            check_parts(plan)
        if readable and can_prove(model, images):
            entries = inputs_of(model, images, readable)
        elif readable:
            kinds = UNPROVED
        for plan in new:
            proof = Proof(state_of(plan, images), kinds)
            if plan.index in entries:
                entry = entries[plan.index]
                prove_block(plan, entry)
                proof.kinds = kinds_beside_tokens(entry)
            self.of[plan.index] = proof

    def _is_new(self, plan: Plan, images: Tensor) -> bool:
        proof = self.of.get(plan.index)
        return proof is None or proof.state != state_of(plan, images)

    def check(self, plan: Plan, entry: BlockInput) -> None:
        """Proves a block that gets other arguments than those for which it has been proved."""
        proof = self.of[plan.index]
        if plan.reader is None or proof.kinds == UNPROVED:
            return
        kinds = kinds_beside_tokens(entry)
        if proof.kinds == kinds:
            return
        if torch.compiler.is_compiling():
            told = "compiled, it gets other arguments than in evaluation: train one batch before"
            raise ValueError(f"{plan.name}: {told}")
        prove_block(plan, entry)
        proof.kinds = kinds


def can_prove(model: nn.Module, images: Tensor) -> bool:
    """Whether blocks can be run: not on a meta device, nor as FSDP gathers them for one pass."""
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


def kinds_beside_tokens(entry: BlockInput) -> Any:
    return kinds_of((entry.args[1:], entry.kwargs))


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
    entries = dict[int, BlockInput]()

    def record(plan: Plan, block: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        check_tokens(plan, args, FEW)
        entry = BlockInput(args, kwargs, plan.adapter, plan.blocks, plan.name)
        if entry.num_tokens > plan.adapter.num_prefix_tokens:
            entries[plan.index] = entry

    few = images[torch.arange(FEW, device=images.device) % len(images)].nan_to_num()
    with ExitStack() as stack:
        for plan in plans:
            told = partial(record, plan)
            stack.enter_context(plan.block.register_forward_pre_hook(told, with_kwargs=True))
        stack.enter_context(torch.no_grad())
        stack.enter_context(evaluating(model))
        stack.enter_context(own_generators(images.device))
        model(few)
    torch.clear_autocast_cache()  # of weights that were cast without gradients
    return entries


def prove_block(plan: Plan, entry: BlockInput) -> None:
    """Raises ValueError with one line if a property does not hold of a block.

    `entry`: arguments of the plain model; its tokens give their shape alone.
    """
    trial = Trial(plan, entry)
    device = entry.args[0].device
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(without_autocast(device.type))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # nothing, for these sizes
        seed = stack.enter_context(own_generators(device))
        # what is tied has one value already, and would be put back wrongly
        torch.func.functional_call(trial, _values(trial), (seed,), tie_weights=False)


def _values(trial: nn.Module) -> dict[str, Tensor]:
    """Draws parameters and copies buffers, in float32: one for each place that holds one."""
    generator = torch.Generator().manual_seed(0)
    drawn, values = dict[int, Tensor](), dict[str, Tensor]()
    for path, part in trial.named_modules():
        for name, own in part.named_parameters(recurse=False, remove_duplicate=False):
            if id(own) not in drawn:
                drawn[id(own)] = _around(own.detach(), generator)
            values[f"{path}.{name}"] = drawn[id(own)]
        for name, own in part.named_buffers(recurse=False, remove_duplicate=False):
            values[f"{path}.{name}"] = _exact(own).clone()
    return values


def _around(own: Tensor, generator: torch.Generator) -> Tensor:
    """Draws parameters around a block's own, of the size that layers begin with."""
    if not own.is_floating_point():
        return own
    noise = torch.randn(own.shape, generator=generator).to(own.device)
    size = 1.0
    if own.squeeze().ndim > 1:  # a matrix, or a kernel
        size = own.squeeze()[0].numel() ** -0.5
    finite = own.float().nan_to_num()  # a model that has diverged is named by its gains
    return finite.clamp(-size, size) + 0.5 * size * noise


def _exact(given: Any) -> Any:
    """Returns arguments in float32."""
    if isinstance(given, Tensor) and given.is_floating_point():
        return given.float()
    if type(given) in (tuple, list):
        return type(given)(_exact(x) for x in given)
    if type(given) is dict:
        return {name: _exact(x) for name, x in given.items()}
    return given


def _change_of_scores(before: Tensor, after: Tensor, column: Tensor) -> Tensor:
    """Returns by how much the scores differ of which two maps are the softmax, `b h n n`.

    `column`: the keys for which the others of a row make room, `b 1 1 n`.
    """
    change = after.log() - before.log()
    change = change.masked_fill(~change.isfinite(), torch.nan)  # masked, or too small
    room = change.masked_fill(column, torch.nan).nanmean(dim=-1, keepdim=True)
    return (change - room).abs()


def _median(change: Tensor, where: Tensor) -> Tensor:
    return change.masked_fill(~where, torch.nan).nanmedian()


def _is_close(found: Tensor, expected: Tensor) -> bool:
    error = (found - expected).abs().max()
    return bool(error <= TOLERANCE * expected.abs().max())


def _are_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(map(_is_close, found, expected))


class Trial(nn.Module):
    """A block, run by `functional_call` with other parameters than its own, and its properties."""

    def __init__(self, plan: Plan, entry: BlockInput):
        super().__init__()
        assert plan.reader is not None, "else nothing is to be proved"
        self.block, self.name, self.reader = plan.block, plan.name, plan.reader
        self.has_memory = plan.vtm is not None
        self.prefix = plan.adapter.num_prefix_tokens
        self.generator = torch.Generator(entry.args[0].device).manual_seed(1)
        self.x = self.draw(entry.args[0].shape)
        args, kwargs = _exact((self.x, *entry.args[1:])), _exact(dict(entry.kwargs))
        self.entry = BlockInput(args, kwargs, plan.adapter, plan.blocks, plan.name)

    def draw(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.generator.device)

    def forward(self, seed: Callable[[], None]) -> None:
        adapter = self.entry.adapter
        self.samples_are_apart(seed)
        if adapter.saliency is not None:
            return
        with evaluating(self.block):
            own = self.run(self.x)
            if adapter.attends_to_all and self.entry.num_tokens >= LEAST:
                self.map_is_of_tokens()
            if self.has_memory:
                self.hidden_tokens_change_nothing(own)
                self.copies_are_seen_at_their_places()
                self.tokens_may_be_there_twice(own)

    def samples_are_apart(self, seed: Callable[[], None]) -> None:
        """In the block's own mode, since a layer may be another one in training.

        One that draws from a generator of its own is compared in evaluation mode.
        """
        with_others = torch.cat([self.x[:1], self.draw(self.x[1:].shape)])
        seen = list[list[Tensor]]()
        for _ in range(AGAIN):
            seen.append(self.of_first_sample(self.x, seed))
            if _are_close(self.of_first_sample(with_others, seed), seen[-1]):
                return
        if not all(_are_close(found, seen[0]) for found in seen):
            with evaluating(self.block):
                own = self.of_first_sample(self.x, seed)
                if _are_close(self.of_first_sample(with_others, seed), own):
                    return
        self.refuse("what it computes for a sample depends on the other samples")

    def of_first_sample(self, tokens: Tensor, seed: Callable[[], None]) -> list[Tensor]:
        """Returns its saliency and, of a block with a memory, what is returned for it."""
        seed()  # random layers draw the same
        found = [self.reader(self.entry.with_tokens(tokens))[:1]]
        if self.has_memory:
            seed()
            found.append(self.run(tokens)[:1])
        return found

    def map_is_of_tokens(self) -> None:
        """Replaces one token of each sample, and compares what changes in the map."""
        n, flat = self.entry.num_tokens, self.x.flatten(1, -2)
        edges = torch.tensor([self.prefix, n - 1, self.prefix], device=flat.device)  # far from most
        is_new = torch.arange(n, device=flat.device) == edges.repeat(len(flat))[: len(flat), None]
        other = torch.where(is_new[..., None], self.draw(flat.shape), flat)
        before, after = (map_of(self.entry.with_tokens(x)).rows() for x in (flat, other))
        if before.shape[-2:] != (n, n):
            self.refuse(f"its map has the shape {list(before.shape)}, for {n} tokens")
        column, row = is_new[:, None, None, :], is_new[:, None, :, None]
        change = _change_of_scores(before.flatten(1, -3), after.flatten(1, -3), column)
        rest = _median(change, ~row & ~column)
        for part in (row & ~column, column & ~row):
            if rest >= SHARE * _median(change, part):
                self.refuse("what has the shape of its attention map is not one of its tokens")

    def run(self, tokens: Tensor) -> Tensor:
        """Returns what the block makes of its own tokens, `b n d`."""
        out, watching = run_watched(self.block.forward, self.entry.with_tokens(tokens))
        watching.checked()
        return tokens_of(self.entry, out, watching.n)

    def run_with(self, tokens: Tensor, places: Tensor, hides: bool = False) -> tuple[Tensor, Any]:
        """Returns the same with a memory, and the map of the own tokens over all, `b h n n+m`."""
        n, memory = self.entry.num_tokens, Memory([tokens], [places])
        try:
            out, watching = run_watched(self.block.forward, self.entry, memory, hides_memory=hides)
        except ValueError:
            raise
        except Exception as error:
            told = f"VTM gives it more tokens, where it fails: {str(error).partition(chr(10))[0]}"
            raise ValueError(f"{self.name}: {told}") from error
        own = tokens_of(self.entry, out, watching.total())[:, :n]
        return own, watching.kept().rows(n)

    def hidden_tokens_change_nothing(self, own: Tensor) -> None:
        places = self.places()
        noise = self.draw([len(places), COPIES, self.x.shape[-1]])
        found, _ = self.run_with(noise, places, hides=True)
        if not _is_close(found, own):
            self.refuse("more tokens change what it returns, beside its attention; VTM adds some")

    def copies_are_seen_at_their_places(self) -> None:
        n, places = self.entry.num_tokens, self.places()
        _, rows = self.run_with(self.x.take_along_dim(places[..., None], dim=1), places)
        rows = rows.flatten(1, -3)  # b h n n+m
        own = rows[..., :n].take_along_dim(places[:, None, None], dim=-1)
        if not _is_close(rows[..., n:], own):
            self.refuse("VTM's memory is not attended to as these tokens are at their own places")

    def tokens_may_be_there_twice(self, own: Tensor) -> None:
        every = torch.arange(self.entry.num_tokens, device=self.x.device)
        found, _ = self.run_with(self.x, every.expand(len(self.x), -1))
        if not _is_close(found, own):
            self.refuse("each token twice changes what it returns, as VTM's memory would")

    def places(self) -> Tensor:
        """Draws places of spatial tokens, others for each sample: `b m`."""
        t = self.entry.num_tokens - self.prefix
        drawn = [torch.randperm(t, generator=self.generator, device=self.x.device) for _ in self.x]
        return self.prefix + torch.stack([x.repeat(COPIES)[:COPIES] for x in drawn])

    def refuse(self, reason: str) -> None:
        raise ValueError(f"{self.name}: {reason}")
