"""A block in one pass: what is planned for it, what enters it, and how it is run with a memory.

Letters: b batch, h heads, n tokens with prefix, t spatial tokens, d width, e head width, m memory;
of an image h w.
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
    """The input of a block in one pass; a detector computes saliency from it, `b t`."""

    args: tuple[Any, ...]  # of the block: its tokens, `b n d` or `b rows columns d`, first
    kwargs: Mapping[str, Any]
    adapter: Adapter
    blocks: Sequence[nn.Module]  # this one and those after it
    name: str
    input_gradient: Tensor | None = None  # b h w, its magnitude
    grid: tuple[int, int] | None = None  # rows and columns of patches, if known
    # the names of the blocks whose map was read; copies by `with_tokens` share this list
    watched: list[str] = field(default_factory=list)

    @property
    def block(self) -> nn.Module:
        return self.blocks[0]

    @property
    def tokens(self) -> Tensor:
        """As the block gets them: `b n d` or `b rows columns d`."""
        tokens: Tensor = self.args[0]
        return tokens

    @property
    def flat_tokens(self) -> Tensor:
        """As `b n d`."""
        return self.tokens.flatten(1, -2)

    @property
    def num_tokens(self) -> int:
        """The number of the tokens, with prefix."""
        return self.tokens.shape[1:-1].numel()

    def with_tokens(self, x: Tensor) -> "BlockInput":
        """Returns a copy with other tokens, of the shape of its own or `b n d`."""
        return replace(self, args=(x.view(self.tokens.shape), *self.args[1:]))

    def watching(
        self,
        keeps_map: bool = True,
        only_map: bool = False,
        memory_indices: Tensor | None = None,
        hides_memory: bool = False,
    ) -> Watching:
        """Returns what sees the map that the block computes on these tokens."""
        self.watched.append(self.name)
        return Watching(
            name=self.name,
            b=len(self.tokens),
            n=self.num_tokens,
            any_shape=self.adapter.geometry is not None,
            keeps_map=keeps_map,
            only_map=only_map,
            memory_indices=memory_indices,
            hides_memory=hides_memory,
        )


Detector = Callable[[BlockInput], Tensor]  # saliency, b t


@dataclass(eq=False)
class Plan:
    """What passes do at a block."""

    index: int
    name: str
    blocks: Sequence[nn.Module]  # this one and those after it
    adapter: Adapter
    htm: HTM | None
    detect: Detector  # HTM's
    vtm: VTM | None
    feeds: Mapping[int, VTM]  # later layers of VTM, which get tokens of this block, by layer
    tried: Detector | None  # the detector that `trial.py` tries out on this block

    @property
    def block(self) -> nn.Module:
        return self.blocks[0]


@dataclass(eq=False)
class Memory:
    """Tokens of earlier blocks, which become keys and values of a later one (Eq. 13).

    HTM and manifold mixup at blocks after a source do not mix its tokens.
    """

    tokens: list[Tensor] = field(default_factory=list)  # of each source, b kappa d
    # theirs in 0..n-1, b kappa: what masks and rotary positions know a token by
    indices: list[Tensor] = field(default_factory=list)


def check_tokens(plan: Plan, args: tuple[Any, ...], b: int, width: int | None = None) -> None:
    """Raises ValueError unless the first argument of a block is tokens."""
    x = args[0] if args else None
    shape = list(x.shape) if isinstance(x, Tensor) else []
    is_grid = len(shape) == 4 and plan.vtm is None  # a memory needs b n d, to be appended to
    are_tokens = (len(shape) == 3 or is_grid) and shape[0] == b
    if not are_tokens or width not in (None, shape[-1]):
        found = shape or type(x).__name__
        needs = "its first argument must be tokens b n d or, without VTM, b rows columns d"
        if width is not None:
            needs += f", with d = Adapter.embed_dim = {width}"
        raise ValueError(f"{plan.name} gets {found}: {needs}")


def run_watched(
    forward: Forward,
    entry: BlockInput,
    memory: Memory | None = None,
    keeps_map: bool = True,
    hides_memory: bool = False,
) -> tuple[Any, Watching]:
    """Runs a block on its own tokens and a memory's; the latter are keys and values only.

    Returns its output, of n tokens or, if no residual sum was cut to these, of n + m; and what has
    seen its map.
    """
    args = entry.args
    kwargs = entry.kwargs
    indices = None
    if memory is not None:
        indices = torch.cat(memory.indices, dim=1)
        args = (torch.cat([entry.tokens, *memory.tokens], dim=1), *args[1:])
        if kwargs.get("rope") is not None:  # timm's EVA, DINOv3 and others: rotary positions
            rope = _rope_of_all(kwargs["rope"], indices, entry.adapter.num_prefix_tokens)
            kwargs = {**kwargs, "rope": rope}
    watching = entry.watching(keeps_map, memory_indices=indices, hides_memory=hides_memory)
    with watching:
        out = forward(*args, **kwargs)
    return out, watching


def _rope_of_all(rope: Tensor, indices: Tensor, num_prefix_tokens: int) -> Tensor:
    """Appends the rotary positions of a memory, by the `indices` of its tokens, `b m` in 0..n-1.

    `rope`: sines, then cosines, of each spatial token, `.. t 2e`; the prefix is not rotated.
    Returns `b h|1 t+m 2e`.
    """
    missing = 4 - rope.ndim
    rope = rope[(None,) * missing].expand(len(indices), -1, -1, -1)  # b h|1 t 2e
    of_prefix = rope.new_zeros(*rope.shape[:2], num_prefix_tokens, rope.shape[3])
    of_prefix[..., rope.shape[3] // 2 :] = 1  # the cosine of no rotation
    of_tokens = torch.cat([of_prefix, rope], dim=2)
    of_memory = of_tokens.take_along_dim(indices[:, None, :, None], dim=2)
    return torch.cat([rope, of_memory], dim=2)


def checked_tokens(entry: BlockInput, out: Any, total: int) -> Tensor:
    """Returns the tokens in `out`, which a block has returned for `total` tokens.

    Raises ValueError unless they are `out`, or the first of a tuple or list and the only tensor of
    their shape there, and as many as the block got, or as its own.
    """
    name = entry.name
    returned = list(out) if isinstance(out, tuple | list) else [out]
    if not returned or not isinstance(returned[0], Tensor):
        must = "must return its tokens, or a tuple or list of which they are the first"
        raise ValueError(f"{name} returns a {type(out).__name__}: {must}")
    tokens = returned[0]
    count = tokens.shape[1:-1].numel()
    if entry.adapter.attends_to_all and count not in (entry.num_tokens, total):
        raise ValueError(f"{name} returns {count} tokens for {total}: must return as many")
    if any(isinstance(x, Tensor) and x.shape == tokens.shape for x in returned[1:]):
        why = "a residual stream beside the tokens cannot be mixed"
        raise ValueError(f"{name} returns a second tensor of the shape of its tokens: {why}")
    return tokens


def with_tokens_of(out: Any, tokens: Tensor) -> Any:
    """Returns what a block has returned, with other tokens."""
    if isinstance(out, Tensor):
        return tokens
    kind = type(out)
    make = getattr(kind, "_make", kind)  # of a named tuple
    return make([tokens, *out[1:]])
