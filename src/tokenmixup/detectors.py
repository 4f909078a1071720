"""What tells the saliency of the tokens that enter a block (Section 3.2 and Table 3).

Letters: b batch, n tokens with prefix, t spatial tokens, d width, h w image.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """The input of block `index`, and what is known of it."""

    blocks: Any  # all blocks of the model
    index: int
    tokens: Tensor  # b n d
    given: dict[str, Any]  # the block's other arguments, which it hands to its attention
    num_prefix_tokens: int
    class_token: bool  # whether the class is read from it, and saliency from its row
    pixels: Tensor | None = None  # b h w, the gradient of the input
    grid: tuple[int, int] | None = None  # rows and columns of patches, where known
    saliency: Tensor | None = None  # b t, by the block's own map
    projected: Sequence[Tensor] = ()  # b n k, by the block's own projections, where known

    def own_saliency(self) -> Tensor:
        """Saliency by the map that the block computes on these tokens, `b t`; computed once.

        The projections are kept: the block's own attention uses them again.
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
        """Saliency, `b t`, by the block's own queries and keys, `b h n e`."""
        bias, rows = self._positions.bias, 1 if self.class_token else None
        bias = None if bias is None else bias[:, :, :rows]
        shares = received(self.blocks[self.index].attn, q[:, :, :rows], k, bias)
        return shares[:, self.num_prefix_tokens :]

    @cached_property
    def _positions(self) -> Positions:
        attn = self.blocks[self.index].attn
        return positions(attn, self.tokens.shape[1], self.given, dropout=False)


def by_gradient(entry: BlockInput) -> Tensor:
    """Saliency by the gradient of the loss with respect to the image, `b t`."""
    assert entry.pixels is not None, "taken before the pass"
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
    "gradient": by_gradient,
    "random": BlockInput.own_saliency,  # pairs by attention; `rules.py` draws the tokens
}


def detector_of(htm: HTM) -> Detector:
    """The detector that the settings choose: the saliency of a block's input, `b t`."""
    steps = htm.rollout_steps
    return partial(by_rollout, steps) if steps > 0 else DETECTORS[htm.detector]


def block_map(
    block: Any, tokens: Tensor, given: dict[str, Any], first_row_only: bool = False
) -> Tensor:
    """The attention map of a block on what enters it, `b h n n`, without dropout.

    `given`: what the block gets besides tokens, as in BlockInput; see `attention_map`.
    """
    with evaluating(attention_module(block)):
        where = positions(block.attn, tokens.shape[1], given)
        return attention_map(block.attn, block.norm1(tokens), first_row_only, where)


def _run(block: Any, tokens: Tensor, given: dict[str, Any]) -> Tensor:
    """The block as in evaluation: its hooks and its attention to a memory stay out."""
    attn, module = attention_module(block), block_module(block)
    own_forward = type(attn).forward.__get__(attn)
    with evaluating(module), replaced_forward(attn, own_forward):
        out = module.forward(tokens, **given)
    if not isinstance(out, Tensor):
        kind = f"{type(module).__name__} returns a {type(out).__name__}"
        raise ValueError(f"htm.rollout_steps: needs blocks that return their tokens, {kind}")
    return out
