"""Saliency detectors for the tokens that enter a block (Section 3.2 and Table 3).

Letters: b batch, n tokens with prefix, t spatial tokens, d width, h w image.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenmixup.attention import attention_map, positions
from tokenmixup.contexts import evaluating
from tokenmixup.encoder import Block
from tokenmixup.saliency import gradient_saliency, rollout_saliency
from tokenmixup.settings import HTM

if TYPE_CHECKING:
    from tokenmixup.module import BlockPass


def by_attention(entry: "BlockPass") -> Tensor:
    """Saliency by the block's own attention map, `b t`."""
    return entry.own_saliency()


def by_mean_attention(entry: "BlockPass") -> Tensor:
    """Saliency by Eq. 3 as printed, also if there is a class token: the mean over all queries."""
    if not entry.encoder.has_parts:
        return entry.own_saliency()  # no class token
    q, k = entry.queries_and_keys()
    return entry.saliency_by(q, k, class_token=False)


def by_gradient(entry: "BlockPass") -> Tensor:
    """Saliency by the gradient of the loss with respect to the image, `b t`."""
    assert entry.pixels is not None, "the gradient is computed before the forward pass"
    if entry.grid is None and not entry.block.adapter.square_patches:
        raise ValueError(
            "htm.detector=gradient: the grid of the patches is not known; "
            "Adapter needs patch_embed, or square_patches=True"
        )
    num_tokens = entry.tokens.shape[1] - entry.num_prefix_tokens
    return gradient_saliency(entry.pixels, num_tokens, entry.grid)


def by_rollout(steps: int, entry: "BlockPass") -> Tensor:
    """Saliency by attention rollout over `steps` further blocks, without dropout, `b t`."""
    tokens, maps = entry.tokens, []
    blocks = entry.encoder.blocks
    with torch.no_grad():
        for block in blocks[entry.index : entry.index + steps]:
            maps.append(block_map(block, tokens, entry.given))
            tokens = _run(block, tokens, entry.given)
        last = blocks[entry.index + steps]
        maps.append(block_map(last, tokens, entry.given, entry.class_token))
    return rollout_saliency(maps, entry.num_prefix_tokens, entry.class_token)


Detector = Callable[["BlockPass"], Tensor]
DETECTORS: dict[str, Detector] = {
    "attention": by_attention,
    "mean_attention": by_mean_attention,
    "gradient": by_gradient,
    "random": by_attention,  # for the pairs; `rules.py` draws the tokens at random
}


def detector_of(htm: HTM) -> Detector:
    """Returns the configured detector, a function from a pass through a block to saliency `b t`."""
    steps = htm.rollout_steps
    return partial(by_rollout, steps) if steps > 0 else DETECTORS[htm.detector]


def block_map(
    block: Block, tokens: Tensor, given: dict[str, Any], first_row_only: bool = False
) -> Tensor:
    """Returns a block's attention map on its input, `b h n n`, without dropout.

    `given`: as in BlockPass; `first_row_only`: as in `attention_map`.
    """
    with evaluating(block.attn):
        parts = block.parts()
        where = positions(parts, tokens.shape[1], given)
        return attention_map(parts, block.norm(tokens), first_row_only, where)


def _run(block: Block, tokens: Tensor, given: dict[str, Any]) -> Tensor:
    """Runs the block as in evaluation."""
    with evaluating(block.module):
        out = block.module.forward(tokens, **given)
    if not isinstance(out, Tensor):
        kind = f"{type(block.module).__name__} returns a {type(out).__name__}"
        raise ValueError(f"htm.rollout_steps: needs blocks that return their tokens, {kind}")
    return out
