"""A block in one pass: what is planned for it, what enters it, and how it is run with a memory.

Letters: b batch, h heads, n tokens with prefix, t spatial tokens, d width, e head width, m memory;
of an image h w.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokenmixup.adapters import Adapter
from tokenmixup.kept import unchanged
from tokenmixup.settings import HTM, VTM
from tokenmixup.vertical import Memory
from tokenmixup.watch import (
    NOT_FUSED,
    Attended,
    AttendedMemory,
    MapSeen,
    Refused,
    Sight,
    Watching,
)

Forward = Callable[..., Any]  # of a module, which has arguments and output of its own


class PlainModule(NamedTuple):
    """A module, and its own `forward`, whatever stands in for that during a pass."""

    module: nn.Module
    forward: Forward


def plain_forward(module: nn.Module) -> Forward:
    """Returns the `forward` of a module: its own, or the one that its class has when it runs."""
    return vars(module).get("forward") or partial(_forward_of_class, module)


def _forward_of_class(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


@dataclass(eq=False)
class Plan:
    """What passes do at a block."""

    index: int
    name: str
    blocks: Sequence[PlainModule]  # this block and those after it
    adapter: Adapter
    htm: HTM | None
    detect: "Detector"  # HTM's
    vtm: VTM | None
    is_mixed: bool  # whether HTM or manifold mixup changes the tokens that enter
    is_source: bool  # whether a later layer of VTM gets tokens of this block
    proved_by: "Detector | None"  # the detector that `trial.py` tries out on this block

    @property
    def block(self) -> nn.Module:
        return self.blocks[0].module

    @property
    def forward(self) -> Forward:
        """The block's own."""
        return self.blocks[0].forward


@dataclass(eq=False)
class BlockInput:
    """The input of a block in one pass; a detector computes saliency from it, `b t`."""

    args: tuple[Any, ...]  # of the block: its tokens, `b n d` or `b rows columns d`, first
    kwargs: Mapping[str, Any]
    plan: Plan  # of the block
    input_gradient: Tensor | None = None  # b h w, its magnitude
    grid: tuple[int, int] | None = None  # rows and columns of the spatial tokens, if known
    sight: Sight = field(default_factory=Sight)  # of the block, once it is proved
    # the names of the blocks whose map was read; copies by `with_tokens` share this list
    watched: list[str] = field(default_factory=list)

    @property
    def block(self) -> nn.Module:
        return self.plan.block

    @property
    def adapter(self) -> Adapter:
        return self.plan.adapter

    @property
    def name(self) -> str:
        return self.plan.name

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

    @property
    def num_spatial_tokens(self) -> int:
        return self.num_tokens - self.adapter.num_prefix_tokens

    def with_tokens(self, x: Tensor) -> "BlockInput":
        """Returns a copy with other tokens, of the shape of its own or `b n d`."""
        return replace(self, args=(x.view(self.tokens.shape), *self.args[1:]))

    def run(self) -> Any:
        """Runs the block itself, to which nothing of TokenMixup stands in."""
        return self.plan.forward(*self.args, **self.kwargs)

    def watching(self, **more: Any) -> Watching:
        """Returns what sees the attention that the block computes on these tokens."""
        self.watched.append(self.name)
        return Watching(
            name=self.name,
            b=len(self.tokens),
            n=self.num_tokens,
            any_shape=self.adapter.geometry is not None,
            sight=self.sight,
            **more,
        )


Detector = Callable[[BlockInput], Tensor]  # saliency, b t


def check_input(plan: Plan, args: tuple[Any, ...], b: int, width: int | None = None) -> None:
    """Raises ValueError unless the first argument of a block is tokens."""
    x = args[0] if args else None
    shape = list(x.shape) if isinstance(x, Tensor) else []
    is_grid = len(shape) == 4 and plan.vtm is None  # a memory's tokens are b m d
    are_tokens = (len(shape) == 3 or is_grid) and shape[0] == b
    if not are_tokens or width not in (None, shape[-1]):
        found = shape or type(x).__name__
        needs = "its first argument must be tokens b n d or, without VTM, b rows columns d"
        if width is not None:
            needs += f", with d = Adapter.embed_dim = {width}"
        raise ValueError(f"{plan.name} gets {found}: {needs}")


def run_watched(
    entry: BlockInput, memory: Memory | None = None, keeps_map: bool = True
) -> tuple[Any, Watching]:
    """Runs a block, whose attention also gets the keys and values of a memory (Eq. 13).

    Returns its output, and what has seen its attention.
    """
    attended = None
    if memory is not None:
        attended = attended_of_memory(entry, memory)
    watching = entry.watching(keeps_map=keeps_map, memory=attended)
    with watching:
        out = entry.run()
    return out, watching


def run_to_attention(entry: BlockInput, of_memory: bool = False) -> Watching:
    """Runs a block as far as its attention, or to its end if its proof asks for that."""
    watching = entry.watching(
        keeps_map=not of_memory, ends=not entry.sight.runs_whole, of_memory=of_memory
    )
    with suppress(MapSeen), watching:
        entry.run()
    return watching


def attended_of(entry: BlockInput, of_memory: bool = False) -> Attended:
    """Returns the keys and values of a block's tokens.

    Raises Refused unless it calls scaled_dot_product_attention or torch's multi-head attention.
    """
    watching = run_to_attention(entry, of_memory)
    if watching.attended is None:
        raise Refused(f"{entry.name} {NOT_FUSED}")
    watching.check()
    return watching.attended


def attended_of_memory(entry: BlockInput, memory: Memory) -> AttendedMemory:
    """Returns the keys and values that a block makes of a memory, from its tokens alone.

    The block's own prefix is put before them, since rotary positions know it by its place. What the
    block draws meanwhile is drawn again for its own tokens, as in the plain model.
    """
    prefix = entry.adapter.num_prefix_tokens
    tokens = torch.cat([entry.tokens[:, :prefix], memory.tokens], dim=1)
    indices = memory.indices
    kwargs = entry.kwargs
    rope = kwargs.get("rope")
    if rope is not None:  # timm's EVA, DINOv3 and others: rotary positions
        if not isinstance(rope, Tensor):
            must = "with VTM it must be one tensor, sines, then cosines: .. t 2e"
            raise Refused(f"{entry.name} gets rope={type(rope).__name__}: {must}")
        kwargs = {**kwargs, "rope": _rope_at(rope, indices, prefix)}
    generators = entry.sight.generators
    # in a run over m tokens only the attention has their number as its size
    sight = entry.sight._replace(nth_map=1, num_maps=1)
    alone = replace(entry, args=(tokens, *entry.args[1:]), kwargs=kwargs, sight=sight)
    if not generators:
        keys, values = attended_of(alone, of_memory=True)
    elif torch.compiler.is_compiling():
        raise Refused(
            f"{entry.name} draws in front of its attention: with VTM it is no part of one graph"
        )
    else:
        with unchanged(*generators):
            keys, values = attended_of(alone, of_memory=True)
    return AttendedMemory(keys[..., prefix:, :], values[..., prefix:, :], indices)


def _rope_at(rope: Tensor, indices: Tensor, num_prefix_tokens: int) -> Tensor:
    """Returns the rotary positions of some tokens, by their `indices`, `b m` in 0..n-1.

    `rope`: sines, then cosines, of each spatial token, `.. t 2e`; the prefix is not rotated.
    Returns `b h|1 m 2e`.
    """
    missing = 4 - rope.ndim
    rope = rope[(None,) * missing].expand(len(indices), -1, -1, -1)  # b h|1 t 2e
    of_prefix = rope.new_zeros(*rope.shape[:2], num_prefix_tokens, rope.shape[3])
    of_prefix[..., rope.shape[3] // 2 :] = 1  # the cosine of no rotation
    of_tokens = torch.cat([of_prefix, rope], dim=2)
    return of_tokens.take_along_dim(indices[:, None, :, None], dim=2)


def returned_tokens(entry: BlockInput, out: Any) -> Tensor:
    """Returns the tokens in `out`, which a block has returned.

    Raises Refused unless they are `out`, or the first of a tuple or list and the only tensor of
    their shape there, and as many as the block got.
    """
    name = entry.name
    returned = list(out) if isinstance(out, tuple | list) else [out]
    if not returned or not isinstance(returned[0], Tensor):
        must = "must return its tokens, or a tuple or list of which they are the first"
        raise Refused(f"{name} returns a {type(out).__name__}: {must}")
    tokens = returned[0]
    count = tokens.shape[1:-1].numel()
    n = entry.num_tokens
    if entry.adapter.attends_to_all and count != n:
        raise Refused(f"{name} returns {count} tokens for {n}: must return as many")
    if any(isinstance(x, Tensor) and x.shape == tokens.shape for x in returned[1:]):
        why = "a residual stream beside the tokens cannot be mixed"
        raise Refused(f"{name} returns a second tensor of the shape of its tokens: {why}")
    return tokens
