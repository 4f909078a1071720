"""The properties that are proved of a block, each tried out on random tokens.

    map       in the attention map, a token has a row, as a query, and a column, as a key: another
              token in its place changes these two, and little else
    samples   what is seen of a sample does not depend on the other samples; with VTM, nor do the
              block's output and gradients, which are finite
    memory    of VTM: keys and values of a token do not depend on the tokens beside it, so that they
              are the same in a run on a memory alone (Eq. 13)

A block runs as it trains: in its mode, dtype and autocast, with its hooks and with gradients. Its
parameters are drawn around its own, since a gate that begins at 0 would hide what it gates. Each
run begins with the same state, that of the block and of the generators, and leaves that behind.

Letters: b batch, h heads, n tokens with prefix, t spatial tokens, d width, m memory.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tokenmixup.attention import AttentionMap
from tokenmixup.block import (
    BlockInput,
    Plan,
    attended_of,
    attended_of_memory,
    returned_tokens,
    run_watched,
)
from tokenmixup.contexts import evaluating
from tokenmixup.kept import GENERATORS, Kept, Left, end_alike, generators_of, unchanged
from tokenmixup.vertical import Memory
from tokenmixup.watch import MUST_BE_ONE, STILL_NEEDED, Refused, Sight, at_places

RUNS = 8  # which show whether a block draws from somewhere unknown
TOLERANCE = 1e-3  # of the largest value; rounding is 1e-6, or 5e-4 in TF32
ROUNDINGS = 8  # of values of the block's dtype, which are allowed where that is more
SAMPLES = 4  # whose maps are compared
MOST_ELSEWHERE = 0.5  # what another token may change, of what it changes in its row and column
LEAST_TOKENS = 4  # of which a map can be told from its shape
BESIDE = (
    "the keys and values of its tokens depend on the tokens beside them or on their places; of "
    "positions VTM serves the rotary ones that a block gets as rope=, one tensor"
)
RUNS_TWICE = "which HTM and VTM run more than once: do that behind it or outside of the block"
Result = TypeVar("Result")


@torch.compiler.disable
def prove_block(plan: Plan, entry: BlockInput) -> Sight:
    """Returns what passes must know of a block; `entry`: its input, random tokens replace its own.

    Raises Refused with one line if a property does not hold.
    """
    generators = generators_of(entry.tokens.device)
    eager = torch.compiler.set_stance("force_eager")  # compiles nothing for these runs
    steps = 0 if plan.htm is None else plan.htm.rollout_steps
    blocks = [each.module for each in plan.blocks[: 1 + steps]]  # which run
    with eager, unchanged(*blocks, *generators):
        for generator in generators:
            if isinstance(generator, torch.Generator):
                generator.manual_seed(0)  # what is proved is no matter of chance
        torch.clear_autocast_cache()  # of parameters, which are drawn now
        _draw_parameters(plan.block)
        sight = Trial(plan, entry).prove()
    torch.clear_autocast_cache()
    return sight


def _draw_parameters(block: nn.Module) -> None:
    """Draws parameters around their values, of the size that layers begin with."""
    generator = torch.Generator("cpu").manual_seed(0)
    for parameter in block.parameters():
        if type(parameter) is not nn.Parameter or not parameter.is_floating_point():
            continue  # the numbers of a quantised one mean something else
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
        size = 1.0
        matrix = parameter.squeeze()
        if matrix.ndim > 1:  # or a kernel
            size = matrix[0].numel() ** -0.5
        # a model that has diverged is not refused here, but by its gains
        finite = parameter.detach().float().nan_to_num()
        around = finite.clamp(-size, size) + 0.5 * size * noise.to(parameter.device)
        parameter.data = around.to(parameter.dtype)


def _leaf(x: Tensor) -> Tensor:
    """Returns a copy without the graph that a tensor comes from."""
    return x.detach().clone().requires_grad_(x.requires_grad)


def _is_of_tokens(before: Tensor, after: Tensor, is_new: Tensor) -> bool:
    """Whether other tokens change their rows and columns of a map, and little else.

    `before`, `after`: `b h n n`; `is_new`: `b n`.
    """
    row = is_new[:, None, :, None]
    column = is_new[:, None, None, :]
    change = _change_of_scores(before, after, column)
    elsewhere = _median(change, ~row & ~column)
    in_row = _median(change, row & ~column)
    in_column = _median(change, column & ~row)
    return bool(elsewhere < MOST_ELSEWHERE * torch.minimum(in_row, in_column))


def _change_of_scores(before: Tensor, after: Tensor, is_new: Tensor) -> Tensor:
    """Returns how much the scores behind two attention maps differ, `b h n n`.

    A map tells the scores of a row up to a constant, which is taken to be the mean change over the
    keys that are not `is_new`, `b 1 1 n`. A key that one map leaves out gives inf, one that both
    leave out nan.
    """
    change = after.log() - before.log()
    told = change.masked_fill(is_new | ~change.isfinite(), torch.nan)
    constant = told.nanmean(dim=-1, keepdim=True).nan_to_num()
    return (change - constant).abs()


def _median(change: Tensor, where: Tensor) -> Tensor:
    """Returns the median of the changes at some places, without nan."""
    return change.masked_fill(~where, torch.nan).nanmedian()


def dtype_of(x: Tensor) -> torch.dtype:
    """Returns the dtype in which a block works on `x`: autocast's, if there is one."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # a meta device has none
        return torch.get_autocast_dtype(kind)
    return x.dtype


class Trial:
    """A block, and its properties."""

    def __init__(self, plan: Plan, entry: BlockInput):
        assert plan.proved_by is not None  # else nothing is to be proved
        self.detect = plan.proved_by
        self.block = plan.block
        self.evaluates = False  # in all runs
        self.plan = plan
        self.prefix = plan.adapter.num_prefix_tokens
        self.like = entry.tokens.detach()
        self.generator = torch.Generator(self.like.device).manual_seed(1)
        self.x = self.draw(self.like.shape).requires_grad_(entry.tokens.requires_grad)
        m = 0  # tokens of VTM's memory
        if plan.vtm is not None:
            m = cast(int, plan.vtm.kappa) * plan.index
        drawn = torch.rand(len(self.x), m, generator=self.generator, device=self.like.device)
        spatial = entry.num_tokens - self.prefix
        self.indices = self.prefix + (spatial * drawn).long()  # theirs, in 0..n-1
        self.tolerance = max(TOLERANCE, ROUNDINGS * torch.finfo(dtype_of(entry.tokens)).eps)
        self.entry = replace(
            entry,
            args=(self.x, *tree_map_only(Tensor, _leaf, entry.args[1:])),
            kwargs=tree_map_only(Tensor, _leaf, dict(entry.kwargs)),
            sight=Sight(),
        )
        cached = torch.nn.utils.parametrize._cache
        given = [self.entry.args, self.entry.kwargs]
        self.kept = Kept(self.block, given, cached, *generators_of(self.like.device))

    def entry_of(self, tokens: Tensor) -> BlockInput:
        """Returns an input that a block may change in place, as it may that of training."""
        return self.entry.with_tokens(tokens.clone())

    def draw(self, shape: Sequence[int]) -> Tensor:
        drawn = torch.empty(shape, dtype=self.like.dtype, device=self.like.device)
        return drawn.normal_(generator=self.generator)

    def output(self) -> list[Tensor]:
        entry = self.entry_of(self.x)
        out = entry.run()
        if not torch.equal(entry.tokens, self.x):
            self.refuse(f"changes the tokens that it gets in place: {STILL_NEEDED}")
        return [returned_tokens(self.entry, out).detach()]

    def prove(self) -> Sight:
        """Tries out all properties. Returns what that tells of the block.

        In evaluation, if the block draws from somewhere unknown, so that its runs differ.
        """
        try:
            return self.prove_in_its_mode()
        except Refused:
            runs = [self.run("as it is", self.output) for _ in range(RUNS)]
            if all(map(self.are_close, runs, runs[1:])):
                raise
        self.evaluates = True
        return self.prove_in_its_mode()

    def prove_in_its_mode(self) -> Sight:
        if self.plan.adapter.attends_to_all and self.entry.num_tokens >= LEAST_TOKENS:
            self.attention_is_of_tokens()
        self.state_is_of_one_run()
        if self.plan.vtm is not None:
            self.keys_are_of_tokens()
        self.samples_are_independent()
        return self.entry.sight

    def run(self, how: str, run: Callable[[], Result], evaluates: bool = False) -> Result:
        """Runs the block somehow, from the state in which it is found, and puts that back."""
        try:
            with evaluating(self.block) if evaluates or self.evaluates else nullcontext():
                return run()
        except Refused:
            raise
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            self.refuse(f"tried {how}, it fails: {type(error).__name__} {first_line}", error)
        finally:
            self.kept.put_back()

    def attention_is_of_tokens(self) -> None:
        """Finds the one call of the block that is attention over its tokens."""
        x = self.entry.flat_tokens
        spatial = x.shape[1] - self.prefix
        is_new = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        is_new[::2, self.prefix + spatial // 3] = True
        is_new[1::2, self.prefix + 2 * spatial // 3] = True
        other = torch.where(is_new[..., None], self.draw(x.shape), x)
        maps = self.maps_of(self.entry_of(self.x))
        calls = self.over_all_tokens(list(maps))
        if len(calls) != 1:
            self.refuse(f"computes {len(calls)} attention maps over its tokens, {MUST_BE_ONE}")
        (call,) = calls
        after = self.maps_of(self.entry_of(other)).get(call)
        if after is None or not _is_of_tokens(maps[call], after, is_new[:SAMPLES]):
            self.refuse("what has the shape of its attention map is not one of its tokens")
        self.entry.sight = Sight(list(maps).index(call) + 1, len(maps))

    def maps_of(self, entry: BlockInput) -> dict[int, Tensor]:
        """Runs the block to its end. Returns all that has the shape of a map, by its call."""

        def run() -> dict[int, Tensor]:
            maps: dict[int, AttentionMap] = {}
            with entry.watching(candidates=maps):
                entry.run()
            few = {call: seen.of(SAMPLES) for call, seen in maps.items()}
            return {call: seen.probabilities().flatten(1, -3) for call, seen in few.items()}

        return self.run("as it is", run)

    def over_all_tokens(self, calls: list[int]) -> list[int]:
        """Returns those calls whose map has the number of tokens as its size, if they are fewer.

        What is over as many experts, for example, keeps its size.
        """
        if len(calls) < 2:
            return calls
        fewer = replace(self.entry, args=(self.x[:, :-1].clone(), *self.entry.args[1:]))
        try:
            maps = self.maps_of(fewer)
        except Refused:  # the block works on so many tokens only
            return calls
        return [call for call in calls if call in maps]

    def state_is_of_one_run(self) -> None:
        """Finds a way of the first runs of HTM and VTM after which a block is as without them.

        They end at the attention; or, if what they change is put back behind it, such as by a hook
        that is one of a pair, they run to their end.
        """
        try:
            self.leaves_the_same(runs_whole=False)
        except Refused as error:
            try:
                self.leaves_the_same(runs_whole=True)
            except Refused:
                raise error from None

    def leaves_the_same(self, runs_whole: bool) -> None:
        """Refuses first runs after which its own leaves something else than alone."""
        self.entry.sight = self.entry.sight._replace(runs_whole=runs_whole, generators=())
        changed = self.left_by("as far as its attention", self.first_runs)
        holders = [self.kept.found[key].x for key, _ in changed]
        drawn = tuple(x for x in holders if type(x) in GENERATORS)
        self.entry.sight = self.entry.sight._replace(generators=drawn)
        alone = self.left_by("as it is", self.output)
        behind = self.left_by("again", self.first_runs, self.output)
        for key, name in behind | alone:
            found = self.kept.found[key]
            before = found.held.get(name)
            after_alone = alone.get((key, name), before)
            after_first_runs = behind.get((key, name), before)
            if not end_alike(after_alone, after_first_runs):
                where = f"{getattr(found.x, '__name__', found.name)}.{name}"
                self.refuse(f"changes {where} in front of its attention, {RUNS_TWICE}")

    def left_by(self, how: str, *runs: Callable[[], Any]) -> Left:
        def run() -> Left:
            for each in runs:
                each()
            return self.kept.changed()

        return self.run(how, run)

    def first_runs(self) -> None:
        """Runs a block as HTM and VTM do in front of its own run, which then draws as alone."""
        with unchanged(*self.entry.sight.generators):
            if self.plan.htm is not None:
                self.detect(self.entry_of(self.x))
            if self.plan.vtm is not None:
                self.keys_alone()

    def samples_are_independent(self) -> None:
        memory = self.draw([*self.indices.shape, self.x.shape[-1]])
        expected = self.of_first_sample(self.x, memory)
        others = [torch.cat([x[:1], self.draw(x[1:].shape)]) for x in (self.x, memory)]
        found = self.of_first_sample(*others)
        if not all(x.isfinite().all() for x in found):
            self.refuse("what it computes, or a gradient, is not finite")
        self.compare(found, expected, "what it computes for a sample depends on the other samples")

    def of_first_sample(self, tokens: Tensor, memory: Tensor) -> list[Tensor]:
        """Returns its saliency; with VTM, also the block's output, and the gradients of both."""
        entry = self.entry_of(tokens)
        found = [self.run("as it is", lambda: self.detect(entry))]
        if self.plan.vtm is not None:
            found += self.run("with a memory", lambda: self.with_memory(tokens, memory))
        return [x.detach()[:1] for x in found]

    def with_memory(self, tokens: Tensor, memory: Tensor) -> list[Tensor]:
        given = [x.detach().requires_grad_(self.x.requires_grad) for x in (tokens, memory)]
        entry = self.entry_of(given[0])
        out, _ = run_watched(entry, Memory(given[1], self.indices))
        own = returned_tokens(entry, out)
        if not self.x.requires_grad:
            return [own]
        # of these alone: the graph behind them is not the trial's
        gradients = torch.autograd.grad(own.square().sum(), given, materialize_grads=True)
        return [own, *gradients]

    def keys_are_of_tokens(self) -> None:
        """Compares keys and values of tokens with those of the same ones as a memory.

        Random layers draw for as many tokens as there are. So what draws is compared in evaluation,
        and in its own mode beside other tokens.
        """
        draws = bool(self.entry.sight.generators)
        alone = self.run("on a memory", self.keys_alone, evaluates=draws)
        self.compare(alone, self.keys_in(self.x, evaluates=draws), BESIDE)
        if draws:
            is_kept = torch.zeros_like(self.x[..., :1]).scatter(1, self.indices[..., None], 1) > 0
            is_kept[:, : self.prefix] = True
            # all others are one token: what is summed over them does not cancel out
            beside = torch.where(is_kept, self.x, self.draw(self.x[:1, :1].shape))
            self.compare(self.keys_in(beside), self.keys_in(self.x), BESIDE)

    def keys_alone(self) -> list[Tensor]:
        tokens = self.x.take_along_dim(self.indices[..., None], dim=1)
        memory = Memory(tokens, self.indices)
        alone = attended_of_memory(self.entry, memory)
        return [alone.keys, alone.values]

    def keys_in(self, tokens: Tensor, evaluates: bool = False) -> list[Tensor]:
        """Returns the keys and values of a memory's tokens among all."""
        entry = self.entry_of(tokens)
        own = self.run("as it is", lambda: attended_of(entry), evaluates)
        return [at_places(x, self.indices, dim=-2) for x in own]

    def compare(self, found: Sequence[Tensor], expected: Sequence[Tensor], reason: str) -> None:
        """Raises Refused unless two runs agree."""
        if not self.are_close(found, expected):
            self.refuse(reason)

    def are_close(self, found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
        for one, other in zip(found, expected, strict=True):
            error = (one - other).abs().max()
            if not error <= self.tolerance * other.abs().max():
                return False
        return True

    def refuse(self, reason: str, cause: Exception | None = None) -> NoReturn:
        raise Refused(f"{self.plan.name}: {reason}") from cause
