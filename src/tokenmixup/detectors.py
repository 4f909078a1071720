"""Saliency detectors for the tokens that enter a block (Section 3.2 and Table 3).

Letters: b batch, n tokens with prefix, t spatial tokens, d width, h w image.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from tokenmixup.adapters import attention_module, block_module
from tokenmixup.attention import (
    Positions,
    attention_map,
    positions,
    project,
    projections,
    received,
)
from tokenmixup.contexts import evaluating, replaced_forward
from tokenmixup.saliency import gradient_saliency, rollout_saliency
from tokenmixup.settings import HTM


@dataclass
class BlockInput:
    """The input of block `index`, from which a detector computes saliency."""

    blocks: Any  # all blocks of the model
    index: int
    tokens: Tensor  # b n d
    given: dict[str, Any]  # the block's further arguments, which it passes to its attention
    num_prefix_tokens: int
    class_token: bool  # whether the head reads the class token; saliency is then its row
    pixels: Tensor | None = None  # b h w, magnitude of the input gradient
    grid: tuple[int, int] | None = None  # rows and columns of patches, if known
    saliency: Tensor | None = None  # b t, by the block's own attention map, once computed
    projected: Sequence[Tensor] = ()  # b n k, the block's own projections, once computed

    def own_saliency(self) -> Tensor:
        """Returns the saliency by the block's own attention map, `b t`; computed once.

        Keeps the projections for the block's attention.
        """
        if self.saliency is None:
            block = self.blocks[self.index]
            normed, rope = block.norm1(self.tokens), self._positions.rope
            self.projected = projections(block.attn, normed)
            with torch.no_grad():
                q, k, _ = project(block.attn, normed, rope, self.projected)
                self.saliency = self.saliency_by(q, k)
        return self.saliency

    @torch.no_grad()
    def saliency_by(self, q: Tensor, k: Tensor) -> Tensor:
        """Returns the saliency, `b t`, by the block's queries and keys, `b h n e`."""
        bias, rows = self._positions.bias, 1 if self.class_token else None
        bias = None if bias is None else bias[:, :, :rows]
        attention = received(self.blocks[self.index].attn, q[:, :, :rows], k, bias)
        return attention[:, self.num_prefix_tokens :]

    @cached_property
    def _positions(self) -> Positions:
        attn = self.blocks[self.index].attn
        return positions(attn, self.tokens.shape[1], self.given, dropout=False)


def by_mean_attention(entry: BlockInput) -> Tensor:
    """Saliency by Eq. 3 as printed, also if there is a class token: the mean over all queries."""
    return replace(entry, class_token=False, saliency=None).own_saliency()


def by_gradient(entry: BlockInput) -> Tensor:
    """Saliency by the gradient of the loss with respect to the image, `b t`."""
    assert entry.pixels is not None, "the gradient is computed before the forward pass"
    num_tokens = entry.tokens.shape[1] - entry.num_prefix_tokens
    return gradient_saliency(entry.pixels, num_tokens, entry.grid)


def by_rollout(steps: int, entry: BlockInput) -> Tensor:
    """Saliency by attention rollout over `steps` further blocks, without dropout, `b t`."""
    tokens, maps = entry.tokens, []
    with torch.no_grad():
        for block in entry.blocks[entry.index : entry.index + steps]:
            maps.append(block_map(block, tokens, entry.given))
            tokens = _run(block, tokens, entry.given)
        last = entry.blocks[entry.index + steps]
        maps.append(block_map(last, tokens, entry.given, entry.class_token))
    return rollout_saliency(maps, entry.num_prefix_tokens, entry.class_token)


Detector = Callable[[BlockInput], Tensor]
DETECTORS: dict[str, Detector] = {
    "attention": BlockInput.own_saliency,
    "mean_attention": by_mean_attention,
    "gradient": by_gradient,
    "random": BlockInput.own_saliency,  # for the pairs; `rules.py` draws the tokens at random
}


def detector_of(htm: HTM) -> Detector:
    """Returns the configured detector, a function from a block's input to saliency `b t`."""
    steps = htm.rollout_steps
    return partial(by_rollout, steps) if steps > 0 else DETECTORS[htm.detector]


def block_map(
    block: Any, tokens: Tensor, given: dict[str, Any], first_row_only: bool = False
) -> Tensor:
    """Returns a block's attention map on its input, `b h n n`, without dropout.

    `given`: as in BlockInput; `first_row_only`: as in `attention_map`.
    """
    with evaluating(attention_module(block)):
        where = positions(block.attn, tokens.shape[1], given)
        return attention_map(block.attn, block.norm1(tokens), first_row_only, where)


def _run(block: Any, tokens: Tensor, given: dict[str, Any]) -> Tensor:
    """Runs the block as in evaluation, without hooks and without attention to a memory."""
    attn, module = attention_module(block), block_module(block)
    own_forward = type(attn).forward.__get__(attn)
    with evaluating(module), replaced_forward(attn, own_forward):
        out = module.forward(tokens, **given)
    if not isinstance(out, Tensor):
        kind = f"{type(module).__name__} returns a {type(out).__name__}"
        raise ValueError(f"htm.rollout_steps: needs blocks that return their tokens, {kind}")
    return out
