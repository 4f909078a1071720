"""One training forward pass, and the pass through each block that TokenMixup touches.

Letters: b batch, h heads, n tokens with prefix, t spatial tokens, d width, e head width, h w image.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from tokenmixup.attention import (
    Positions,
    attend,
    composed_map,
    positions,
    project,
    projections,
    received,
)
from tokenmixup.encoder import Block, Encoder
from tokenmixup.horizontal import HorizontalMix
from tokenmixup.manifold import ManifoldMix
from tokenmixup.output import LayerMix, Output
from tokenmixup.saliency import attention_saliency
from tokenmixup.vertical import Memory, vertical_attention


@dataclass
class BlockPass:
    """Block `index` in one pass: its input, from which a detector computes saliency."""

    encoder: Encoder
    index: int
    tokens: Tensor  # b n d, after mixing the mixed ones
    given: dict[str, Any]  # the block's further arguments, which it passes to its attention
    num_prefix_tokens: int
    class_token: bool  # whether the head reads the class token; saliency is then its row
    pixels: Tensor | None = None  # b h w, magnitude of the input gradient
    grid: tuple[int, int] | None = None  # rows and columns of patches, if known
    memory: Memory | None = None  # that its attention reads (VTM)
    later: Sequence[Memory] = ()  # of later blocks, which it feeds
    saliency: Tensor | None = None  # b t, by the block's own attention map, once computed
    projected: Sequence[Tensor] = ()  # b n k, the block's own projections, once computed
    where: Positions | None = None  # positional terms of the tokens, once computed
    called: tuple[Any, ...] = ()  # the block's positional arguments, before mixing

    def __post_init__(self) -> None:
        self.block: Block = self.encoder.blocks[self.index]
        if self.encoder.has_parts:
            self.parts = self.block.parts()

    def inputs(self) -> tuple[Any, ...]:
        """Returns the block's positional arguments, with the tokens as they are now."""
        first, *others = self.called
        return self.block.adapter.tokens[1](self.tokens, first), *others

    def own_saliency(self) -> Tensor:
        """Returns the saliency by the block's own attention map, `b t`; computed once.

        Keeps the projections for the block's attention, if it has Parts.
        """
        if self.saliency is None and (of_block := self.block.adapter.saliency) is not None:
            with torch.no_grad():
                self.saliency = of_block(self.block.module, *self.inputs(), **self.given)
        elif self.saliency is None:
            q, k = self.queries_and_keys()
            self.saliency = self.saliency_by(q, k, self.class_token)
        return self.saliency

    def queries_and_keys(self) -> list[Tensor]:
        """Returns the block's own queries and keys, `b h n e`, and keeps its projections."""
        normed = self.block.norm(self.tokens)
        self.projected = projections(self.parts, normed)
        with torch.no_grad():
            return project(self.parts, normed, self._positions().rope, self.projected)[:2]

    def saliency_by(self, q: Tensor, k: Tensor, class_token: bool) -> Tensor:
        """Returns the saliency, `b t`, by queries and keys, `b h n e`.

        `class_token`: by its row of the attention map, else by the mean over all rows.
        """
        bias, rows = self._positions().bias, 1 if class_token else None
        bias = None if bias is None else bias[:, :, :rows]
        attention = received(self.parts, q[:, :, :rows], k, bias)
        return attention[:, self.num_prefix_tokens :]

    def _positions(self) -> Positions:
        if self.where is None:
            n = self.tokens.shape[1]
            self.where = positions(self.parts, n, self.given, dropout=False)
        return self.where

    def mix(self, mix: HorizontalMix, moves_saliency: bool) -> None:
        """Replaces the tokens by the mixed ones; what is known of them moves along."""
        if self.later and self.saliency is not None and moves_saliency:
            self.saliency = torch.where(mix.mask, self.saliency[mix.donor], self.saliency)
        self.projected = [mix.exchange(y) for y in self.projected]
        self.tokens = mix.tokens

    def remember(self, saliency: Tensor) -> None:
        """Stores the most salient tokens, by `b t`, for every later layer of VTM."""
        for memory in self.later:
            memory.remember(self.tokens, saliency, self.num_prefix_tokens)

    def attend(self, normed: Tensor, **given: Any) -> Tensor:
        """Answers in place of the block's attention: `b n d`, layer-normed, -> `b n d`.

        `given`: further arguments of the attention. Projections that are known are not computed
        again. VTM's layer attends to the memory too (Eq. 13). A source of VTM whose saliency is not
        known yet reads it off its attention map, if it computes one; but not with a bias, which may
        contain dropout.
        """
        where = positions(self.parts, normed.shape[1], given)
        if self.memory is not None:
            where = where.of_memory(self.memory.indices)
            own = [] if self.projected else [self.tokens]
            context = self.block.norm(torch.cat([*own, *self.memory.tokens], dim=1))
            return vertical_attention(self.parts, normed, context, where, self.projected)
        q, k, v = project(self.parts, normed, where.rope, self.projected)
        weights = None
        if self.later and self.saliency is None:
            weights = composed_map(self.parts, q, k, where.bias)
            if weights is None or where.bias is not None:
                self.remember(self.saliency_by(q, k, self.class_token))
            else:
                prefix = self.num_prefix_tokens
                self.remember(attention_saliency(weights, prefix, self.class_token))
        return attend(self.parts, normed, q, k, v, where.bias, weights)


@dataclass
class ForwardPass:
    """The state of one training forward pass."""

    targets: Tensor  # b c, as mixed so far
    pixels: Tensor | None = None  # b h w, magnitude of the input gradient
    manifold: ManifoldMix | None = None
    num_patches: int | None = None  # of the patch embedding's output
    grid: tuple[int, int] | None = None  # rows and columns of patches
    memories: dict[int, Memory] = field(default_factory=dict)  # by the layer that attends to it
    layers: list[LayerMix] = field(default_factory=list)  # of HTM
    mixes: dict[int, HorizontalMix] = field(default_factory=dict)  # by layer of HTM
    blocks: dict[int, BlockPass] = field(default_factory=dict)  # that have run, by index
    last: int = -1  # index of the touched block that ran last

    def note_patches(self, embedding: Any, images: Any, out: Any) -> None:
        """Keeps the grid of the patch embedding's output, `b t d` or `b rows columns d`."""
        if not isinstance(out, Tensor) or out.ndim not in (3, 4):
            return
        self.num_patches = out.shape[1:-1].numel()
        if out.ndim == 4:
            self.grid = (out.shape[1], out.shape[2])
        elif hasattr(embedding, "dynamic_feat_size"):
            rows, columns = embedding.dynamic_feat_size(tuple(images.shape[-2:]))
            self.grid = (rows, columns) if rows * columns == self.num_patches else None

    def enter(
        self, encoder: Encoder, index: int, args: tuple[Any, ...], given: dict[str, Any]
    ) -> BlockPass:
        """Begins the pass through a block. Raises ValueError for one that runs out of order."""
        tokens = _tokens_of(encoder, index, args)
        if index <= self.last:
            raise ValueError(f"block {index} runs again: must run once in a forward pass, in order")
        self.last, n, prefix = index, tokens.shape[1], encoder.num_prefix_tokens
        if self.num_patches is not None:
            prefix = n - self.num_patches
        if not 0 <= prefix < n:
            raise ValueError(
                f"block {index} gets {n} tokens for {n - prefix} patches: "
                "TokenMixup cannot tell which tokens are the prefix"
            )
        spatial = args[0].shape[1:-1]
        is_map = len(spatial) == 2 and spatial.numel() == n  # with its channels last
        self.blocks[index] = BlockPass(
            encoder,
            index,
            tokens,
            given,
            prefix,
            class_token=prefix > 0 and encoder.reads_class_token,
            pixels=self.pixels,
            grid=(spatial[0], spatial[1]) if is_map else self.grid,
            memory=self.memories.get(index),
            later=[memory for layer, memory in self.memories.items() if layer > index],
            called=args,
        )
        return self.blocks[index]

    def output(self, logits: Any, score_loss_weight: float = 0.0) -> Output:
        """Returns the output of the pass. Raises ValueError if the logits are not `b c`."""
        shape = [*logits.shape] if isinstance(logits, Tensor) else type(logits).__name__
        if shape != (expected := [*self.targets.shape]):
            raise ValueError(f"the model returned {shape}, not one tensor of logits {expected}")
        if not self.layers:
            return Output(logits, self.targets)
        return Output(
            logits,
            self.targets,
            reduce(torch.add, [mix.difficulty.mean() for mix in self.layers]),
            reduce(torch.logical_or, [mix.is_easy for mix in self.layers]),
            reduce(torch.logical_or, [mix.mask for mix in self.layers]),
            reduce(torch.add, [mix.gain for mix in self.layers]),
            tuple(self.layers),
            score_loss_weight,
        )


def _tokens_of(encoder: Encoder, index: int, args: tuple[Any, ...]) -> Tensor:
    """Returns the tokens that enter a block, `b n d`. Raises ValueError for other arguments."""
    if not args:
        raise ValueError(f"block {index} gets its tokens by keyword: must be first argument")
    x, dims = args[0], (3,) if encoder.has_parts else (3, 4)
    if not isinstance(x, Tensor) or x.ndim not in dims:
        found = [*getattr(x, "shape", [])] or type(x).__name__
        raise ValueError(f"block {index} gets {found}: must be tokens b n d")
    if encoder.has_parts and any(value is not None for value in args[1:]):
        raise ValueError(f"block {index} gets further positional arguments: not supported")
    return encoder.blocks[index].adapter.tokens[0](x)
