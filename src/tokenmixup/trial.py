"""The properties that are proved of a block, each tried out on random tokens.

    samples   what is seen of a sample does not depend on the other samples
    map       in an attention map, a token has a row, as a query, and a column, as a key: another
              token in its place changes these two, and little else
    memory    of VTM, which appends tokens to a block's own (Eq. 13):
      hidden    tokens that nobody sees change nothing: where they are, beside its attention, a
                block works token by token
      copies    copies of tokens are attended to as these are: positions and masks are theirs
      twice     if each token is there twice, what the block returns is the same: each of two equal
                keys gets half the weight, so the sum over the values is the same

A block runs with arguments of the plain model, in float32 and without gradients. Its parameters are
drawn around its own, since a gate that begins at 0 would hide what it gates.

Letters: b batch, h heads, n tokens with prefix, t spatial tokens, d width, m memory.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from tokenmixup.block import BlockInput, Memory, Plan, checked_tokens, run_watched
from tokenmixup.contexts import evaluating, own_generators, without_autocast
from tokenmixup.saliency import map_of

COPIES = 4  # tokens of a memory
TOLERANCE = 1e-3  # of the largest value; rounding is 1e-6, or 5e-4 in TF32
RUNS = 8  # which show whether a block draws from a generator of its own
MOST_ELSEWHERE = 0.5  # what another token may change, of what it changes in its row and column
LEAST_TOKENS = 4  # of which a map can be told from its shape


def prove_block(plan: Plan, entry: BlockInput) -> None:
    """Raises ValueError with one line if a property does not hold of a block.

    `entry`: arguments of the plain model; its tokens give their shape alone.
    """
    device = entry.tokens.device
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(without_autocast(device.type))
        stack.enter_context(
            torch.compiler.set_stance("force_eager")
        )  # compiles nothing for these runs
        trial = Trial(plan, entry, seed=stack.enter_context(own_generators(device)))
        # `_values` gives tied parameters one value; torch's own way would restore them wrongly
        torch.func.functional_call(trial, _values(trial), (), tie_weights=False)


def _values(trial: nn.Module) -> dict[str, Tensor]:
    """Draws parameters and copies buffers, in float32: one for each place that holds one."""
    generator = torch.Generator().manual_seed(0)
    drawn: dict[int, Tensor] = {}  # a parameter that two places hold is drawn once
    values: dict[str, Tensor] = {}
    for path, part in trial.named_modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in drawn:
                drawn[id(parameter)] = _around(parameter.detach(), generator)
            values[f"{path}.{name}"] = drawn[id(parameter)]
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            values[f"{path}.{name}"] = _in_float32(buffer).clone()
    return values


def _around(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Draws a parameter around its value, of the size that layers begin with."""
    if not parameter.is_floating_point():
        return parameter
    noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
    size = 1.0
    matrix = parameter.squeeze()
    if matrix.ndim > 1:  # or a kernel
        size = matrix[0].numel() ** -0.5
    # a model that has diverged is not refused here, but by its gains
    finite = parameter.float().nan_to_num()
    return finite.clamp(-size, size) + 0.5 * size * noise


def _in_float32(given: Any) -> Any:
    """Returns arguments in float32."""
    if isinstance(given, Tensor) and given.is_floating_point():
        return given.float()
    if type(given) in (tuple, list):
        return type(given)(_in_float32(x) for x in given)
    if type(given) is dict:
        return {name: _in_float32(x) for name, x in given.items()}
    return given


def _change_of_scores(before: Tensor, after: Tensor, is_new: Tensor) -> Tensor:
    """Returns how much the scores behind two attention maps differ, `b h n n`.

    A map tells the scores of a row up to a constant. The mean change over the keys that are not
    `is_new`, `b 1 1 n`, is taken for it.
    """
    change = after.log() - before.log()
    change = change.masked_fill(~change.isfinite(), torch.nan)  # masked keys, or too small
    constant = change.masked_fill(is_new, torch.nan).nanmean(dim=-1, keepdim=True)
    return (change - constant).abs()


def _median(change: Tensor, where: Tensor) -> Tensor:
    """Returns the median of the changes at some places, without nan."""
    return change.masked_fill(~where, torch.nan).nanmedian()


def _is_close(found: Tensor, expected: Tensor) -> bool:
    error = (found - expected).abs().max()
    return bool(error <= TOLERANCE * expected.abs().max())


def _are_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(map(_is_close, found, expected))


class Trial(nn.Module):
    """A block, run by `functional_call` with other parameters than its own, and its properties."""

    def __init__(self, plan: Plan, entry: BlockInput, seed: Callable[[], None]):
        super().__init__()
        assert plan.tried is not None  # else nothing is to be proved
        self.block = plan.block
        self.name = plan.name
        self.detect = plan.tried
        self.has_memory = plan.vtm is not None
        self.num_prefix_tokens = plan.adapter.num_prefix_tokens
        self.seed = seed  # seeds the generators that random layers draw from
        self.generator = torch.Generator(entry.tokens.device).manual_seed(1)
        self.x = self.draw(entry.tokens.shape)
        self.entry = BlockInput(
            args=(self.x, *_in_float32(entry.args[1:])),
            kwargs=_in_float32(dict(entry.kwargs)),
            adapter=plan.adapter,
            blocks=plan.blocks,
            name=plan.name,
        )

    def draw(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.generator.device)

    def forward(self) -> None:
        """Tries out all properties; `functional_call` calls it."""
        adapter = self.entry.adapter
        self.samples_are_apart()
        if adapter.saliency is not None:
            return
        with evaluating(self.block):
            own = self.run(self.x)
            if adapter.attends_to_all and self.entry.num_tokens >= LEAST_TOKENS:
                self.map_is_of_tokens()
            if self.has_memory:
                self.hidden_tokens_change_nothing(own)
                self.copies_are_seen_as_their_tokens()
                self.tokens_may_be_there_twice(own)

    def samples_are_apart(self) -> None:
        """In the block's own mode, since layers such as dropout differ in training.

        A block that draws from a generator of its own is compared in evaluation mode.
        """
        with_others = torch.cat([self.x[:1], self.draw(self.x[1:].shape)])
        runs = []
        for _ in range(RUNS):
            run = self.of_first_sample(self.x)
            if _are_close(self.of_first_sample(with_others), run):
                return
            runs.append(run)
        # all runs have the same seed and the same tokens
        draws_by_itself = not all(_are_close(run, runs[0]) for run in runs)
        if draws_by_itself:
            with evaluating(self.block):
                run = self.of_first_sample(self.x)
                if _are_close(self.of_first_sample(with_others), run):
                    return
        self.refuse("what it computes for a sample depends on the other samples")

    def of_first_sample(self, tokens: Tensor) -> list[Tensor]:
        """Returns its saliency and, if the block gets a memory, what the block returns for it."""
        self.seed()  # random layers draw the same
        results = [self.detect(self.entry.with_tokens(tokens))[:1]]
        if self.has_memory:
            self.seed()
            results.append(self.run(tokens)[:1])
        return results

    def map_is_of_tokens(self) -> None:
        """Replaces one token of each sample, and compares what changes in the map."""
        n = self.entry.num_tokens
        x = self.entry.flat_tokens
        # the place of the new token is the first patch, or the last: both are far from most tokens
        place = torch.full([len(x), 1], self.num_prefix_tokens, device=x.device)
        place[1::2] = n - 1
        is_new = torch.arange(n, device=x.device) == place  # b n
        other = torch.where(is_new[..., None], self.draw(x.shape), x)
        before = map_of(self.entry).probabilities()
        after = map_of(self.entry.with_tokens(other)).probabilities()
        if before.shape[-2:] != (n, n):
            self.refuse(f"its map has the shape {list(before.shape)}, for {n} tokens")
        row = is_new[:, None, :, None]
        column = is_new[:, None, None, :]
        change = _change_of_scores(before.flatten(1, -3), after.flatten(1, -3), column)
        elsewhere = _median(change, ~row & ~column)
        for where in (row & ~column, column & ~row):
            if elsewhere >= MOST_ELSEWHERE * _median(change, where):
                self.refuse("what has the shape of its attention map is not one of its tokens")

    def run(self, tokens: Tensor) -> Tensor:
        """Returns what the block makes of its own tokens, `b n d`."""
        out, watching = run_watched(self.block.forward, self.entry.with_tokens(tokens))
        watching.check()
        return checked_tokens(self.entry, out, watching.n)

    def run_with(
        self, tokens: Tensor, indices: Tensor, hides_memory: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Returns the same with a memory, and the map of the own tokens over all, `b h n n+m`."""
        n = self.entry.num_tokens
        memory = Memory([tokens], [indices])
        try:
            out, watching = run_watched(
                self.block.forward, self.entry, memory, hides_memory=hides_memory
            )
        except ValueError:
            raise
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            self.refuse(f"VTM gives it more tokens, where it fails: {first_line}", error)
        own = checked_tokens(self.entry, out, watching.total())[:, :n]
        return own, watching.kept_map().probabilities(n).flatten(1, -3)

    def hidden_tokens_change_nothing(self, own: Tensor) -> None:
        indices = self.some_indices()
        noise = self.draw([len(indices), COPIES, self.x.shape[-1]])
        beside_noise, _ = self.run_with(noise, indices, hides_memory=True)
        if not _is_close(beside_noise, own):
            self.refuse("more tokens change what it returns, beside its attention; VTM adds some")

    def copies_are_seen_as_their_tokens(self) -> None:
        n = self.entry.num_tokens
        indices = self.some_indices()
        copies = self.x.take_along_dim(indices[..., None], dim=1)
        _, rows = self.run_with(copies, indices)
        of_tokens = rows[..., :n].take_along_dim(indices[:, None, None], dim=-1)
        of_copies = rows[..., n:]
        if not _is_close(of_copies, of_tokens):
            self.refuse("VTM's memory is not attended to as these tokens are at their own places")

    def tokens_may_be_there_twice(self, own: Tensor) -> None:
        every = torch.arange(self.entry.num_tokens, device=self.x.device)
        beside_itself, _ = self.run_with(self.x, every.expand(len(self.x), -1))
        if not _is_close(beside_itself, own):
            self.refuse("each token twice changes what it returns, as VTM's memory would")

    def some_indices(self) -> Tensor:
        """Draws spatial tokens, others for each sample: `b m`, in 0..n-1."""
        t = self.entry.num_tokens - self.num_prefix_tokens
        of_samples = []
        for _ in self.x:
            drawn = torch.randperm(t, generator=self.generator, device=self.x.device)
            of_samples.append(drawn.repeat(COPIES)[:COPIES])  # there may be fewer tokens
        return self.num_prefix_tokens + torch.stack(of_samples)

    def refuse(self, reason: str, cause: Exception | None = None) -> NoReturn:
        raise ValueError(f"{self.name}: {reason}") from cause
