"""A block in one pass: what is planned for it, what enters it, and how it is run with a memory.

Letters: b batch, h heads, n tokens with prefix, t spatial tokens, d width, e head width, m memory;
of an image h w.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokenmixup.adapters import Adapter
from tokenmixup.attention import AttendedMemory, MapSeen, Watching
from tokenmixup.settings import HTM, VTM
from tokenmixup.vertical import Memory

Forward = Callable[..., Any]  # of a module, which has arguments and output of its own


class Plain(NamedTuple):
    """A module and its own `forward`, whatever wraps that during a pass."""

    module: nn.Module
    own: Forward | None  # what the instance has as `forward`; None: that of its class

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


@dataclass(eq=False)
class Plan:
    """What passes do at a block."""

    index: int
    name: str
    blocks: Sequence[Plain]  # this block and those after it
    adapter: Adapter
    htm: HTM | None
    detect: "Detector"  # HTM's
    vtm: VTM | None
    is_source: bool  # whether a later layer of VTM gets tokens of this block
    evaluated: tuple[int, ...] | None = None  # rows and columns of images, and its tokens there

    @property
    def block(self) -> nn.Module:
        return self.blocks[0].module


@dataclass(eq=False)
class BlockInput:
    """The input of a block in one pass; a detector computes saliency from it, `b t`."""

    args: tuple[Any, ...]  # of the block: its tokens, `b n d` or `b rows columns d`, first
    kwargs: Mapping[str, Any]
    plan: Plan  # of the block
    input_gradient: Tensor | None = None  # b h w, its magnitude
    grid: tuple[int, int] | None = None  # rows and columns of the spatial tokens, if known

    @property
    def block(self) -> nn.Module:
        return self.plan.block

    @property
    def adapter(self) -> Adapter:
        return self.plan.adapter

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


Detector = Callable[[BlockInput], Tensor]  # saliency, b t


def input_of(plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BlockInput:
    """Returns what enters a block. Raises ValueError unless it is tokens, some of them spatial."""
    x = args[0] if args else None
    if not isinstance(x, Tensor) or x.ndim not in (3, 4):
        must = "its first argument must be tokens b n d or, without VTM, b rows columns d"
        raise ValueError(f"{plan.name} gets {type(x).__name__}: {must}")
    block_input = BlockInput(args, kwargs, plan)
    if block_input.num_spatial_tokens < 1:
        found = f"{block_input.num_tokens} tokens"
        must = f"must be more than Adapter.num_prefix_tokens={plan.adapter.num_prefix_tokens}"
        raise ValueError(f"{plan.name} gets {found}: {must}")
    return block_input


def run_watched(
    block_input: BlockInput, memory: AttendedMemory | None = None, ends: bool = False
) -> tuple[Any, Watching]:
    """Runs a block, whose attention also gets the keys and values of a memory (Eq. 13).

    Returns its output, and what has seen its attention, at which the run `ends` if `ends`.
    """
    watching = Watching(
        name=block_input.plan.name,
        b=len(block_input.tokens),
        n=block_input.num_tokens,
        any_shape=block_input.adapter.geometry is not None,
        ends=ends,
        memory=memory,
    )
    out = None
    with suppress(MapSeen), watching:
        out = block_input.plan.blocks[0].run(*block_input.args, **block_input.kwargs)
    return out, watching


def attended_of_memory(block_input: BlockInput, memory: Memory) -> AttendedMemory:
    """Returns the keys and values that a block makes of a memory, from its tokens alone.

    The block's own prefix is put before them, since rotary positions know it by its place.
    """
    prefix = block_input.adapter.num_prefix_tokens
    tokens = torch.cat([block_input.tokens[:, :prefix], memory.tokens], dim=1)
    kwargs = block_input.kwargs
    if kwargs.get("rope") is not None:  # timm's EVA, DINOv3 and others: rotary positions
        kwargs = {**kwargs, "rope": _rope_at(kwargs["rope"], memory.indices, prefix)}
    alone = replace(block_input, args=(tokens, *block_input.args[1:]), kwargs=kwargs)
    _, watching = run_watched(alone, ends=True)
    keys, values = watching.fused()
    return AttendedMemory((keys[..., prefix:, :], values[..., prefix:, :]), memory.indices)


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
