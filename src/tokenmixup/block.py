"""A block in one pass: what is planned for it, what enters it, and how it is run with a memory.

Letters: b batch, n tokens with prefix, t spatial tokens, d width, m memory, h w image.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tokenmixup.adapters import Adapter
from tokenmixup.settings import HTM, VTM
from tokenmixup.watch import Watching

Forward = Callable[..., Any]  # of a module, which has arguments and output of its own


@dataclass(eq=False)
class BlockInput:
    """What enters a block in one pass: that from which a detector computes saliency, `b t`."""

    args: tuple[Any, ...]  # of the block: its tokens, `b n d` or `b rows columns d`, first
    kwargs: Mapping[str, Any]
    adapter: Adapter
    blocks: Sequence[nn.Module]  # this one and those behind it
    name: str = "the block"
    pixels: Tensor | None = None  # b h w, magnitude of the input gradient
    grid: tuple[int, int] | None = None  # rows and columns of patches, if known
    watched: list[str] = field(default_factory=list)  # the blocks whose map was asked for

    @property
    def tokens(self) -> Tensor:
        """As the block gets them: `b n d` or `b rows columns d`."""
        tokens: Tensor = self.args[0]
        return tokens

    @property
    def num_tokens(self) -> int:
        """The number of the tokens, with prefix."""
        return self.tokens.shape[1:-1].numel()

    def with_tokens(self, x: Tensor) -> "BlockInput":
        """Returns the same for other tokens: `b n d`, or as those that it has."""
        return replace(self, args=(x.view(self.tokens.shape), *self.args[1:]))

    def watching(self, keeps_map: bool = True, only_map: bool = False) -> Watching:
        """Returns what sees the map that the block computes on these tokens."""
        self.watched.append(self.name)
        return Watching(
            name=self.name,
            b=len(self.tokens),
            n=self.num_tokens,
            any_shape=self.adapter.geometry is not None,
            keeps_map=keeps_map,
            only_map=only_map,
        )


Detector = Callable[[BlockInput], Tensor]  # saliency, b t


@dataclass(eq=False)
class Plan:
    """What passes do at a block."""

    index: int
    name: str
    blocks: Sequence[nn.Module]  # this one and those behind it
    adapter: Adapter
    htm: HTM | None
    detect: Detector  # HTM's
    vtm: VTM | None
    feeds: Mapping[int, VTM]  # the later layers of VTM, whose memory takes its tokens
    reader: Detector | None  # what reads its map, and is proved to read it rightly

    @property
    def block(self) -> nn.Module:
        return self.blocks[0]


@dataclass(eq=False)
class Memory:
    """Tokens of earlier blocks, which become keys and values of a later one (Eq. 13)."""

    tokens: list[Tensor] = field(default_factory=list)  # of each source, b kappa d
    indices: list[Tensor] = field(default_factory=list)  # theirs in 0..n-1, b kappa


def check_tokens(plan: Plan, args: tuple[Any, ...], b: int, width: int | None = None) -> None:
    """Raises ValueError unless the first argument of a block is tokens."""
    x = args[0] if args else None
    shape = list(x.shape) if isinstance(x, Tensor) else []
    is_map = len(shape) == 4 and plan.vtm is None  # of rows and columns
    are_tokens = (len(shape) == 3 or is_map) and shape[0] == b
    if not are_tokens or width not in (None, shape[-1]):
        found = shape or type(x).__name__
        needs = f"its first argument must be tokens b n {width or 'd'} (Adapter.embed_dim)"
        raise ValueError(f"{plan.name} gets {found}: {needs}")


def run_watched(
    forward: Forward,
    entry: BlockInput,
    memory: Memory | None = None,
    keeps_map: bool = True,
    hides_memory: bool = False,
) -> tuple[Any, Watching]:
    """Runs a block on its own tokens and those of a memory; the latter ask nothing (watch.py).

    Returns its output for all of them, and what has seen its map.
    """
    watching = entry.watching(keeps_map)
    args = entry.args
    kwargs = entry.kwargs
    if memory is not None:
        indices = torch.cat(memory.indices, dim=1)
        watching.memory_indices = indices
        watching.hides_memory = hides_memory
        args = (torch.cat([entry.tokens, *memory.tokens], dim=1), *args[1:])
        if kwargs.get("rope") is not None:
            rope = _rope_of_all(kwargs["rope"], indices, entry.adapter.num_prefix_tokens)
            kwargs = {**kwargs, "rope": rope}
    with watching:
        out = forward(*args, **kwargs)
    return out, watching


def _rope_of_all(rope: Tensor, indices: Tensor, prefix: int) -> Tensor:
    """Appends the rotary positions of a memory, whose tokens are the `indices`, `b m`, of the n.

    `rope`: sines, then cosines, of each spatial token, `.. t 2e`; the prefix is not rotated.
    Returns `b h|1 t+m 2e`.
    """
    rope = rope[(None,) * (4 - rope.ndim)].expand(len(indices), -1, -1, -1)
    of_prefix = rope.new_zeros(*rope.shape[:2], prefix, rope.shape[3])
    _, cosines = of_prefix.chunk(2, dim=-1)
    cosines.fill_(1)
    of_tokens = torch.cat([of_prefix, rope], dim=2)
    of_memory = of_tokens.take_along_dim(indices[:, None, :, None], dim=2)
    return torch.cat([rope, of_memory], dim=2)


def tokens_of(entry: BlockInput, out: Any, total: int) -> Tensor:
    """Returns the tokens that a block returns for `total` of them.

    Raises ValueError unless these are what it returns, or the first of a tuple or list, as many as
    it got, and the only tensor of their shape there.
    """
    name = entry.name
    returned = list(out) if isinstance(out, tuple | list) else [out]
    if not returned or not isinstance(returned[0], Tensor):
        must = "must return its tokens, or a tuple or list of which they are the first"
        raise ValueError(f"{name} returns a {type(out).__name__}: {must}")
    tokens = returned[0]
    count = tokens.shape[1:-1].numel()
    if entry.adapter.attends_to_all and count != total:
        raise ValueError(f"{name} returns {count} tokens for {total}: must return as many")
    if any(isinstance(x, Tensor) and x.shape == tokens.shape for x in returned[1:]):
        must = "a residual stream beside the tokens cannot be mixed"
        raise ValueError(f"{name} returns a second tensor of the shape of its tokens: {must}")
    return tokens


def with_tokens_of(out: Any, tokens: Tensor) -> Any:
    """Returns what a block has returned, with other tokens."""
    if isinstance(out, Tensor):
        return tokens
    kind = type(out)
    make = getattr(kind, "_make", kind)  # of a named tuple
    return make([tokens, *out[1:]])
