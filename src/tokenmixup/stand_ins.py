"""What stands in for a block's attention in a training pass, and computes the same and more.

`tokens` are layer-normed already, `b n d`; `given` are the block's other arguments.
"""

from typing import Any, cast

import torch
from torch import Tensor

from tokenmixup.attention import attend, composed_map, positions, project
from tokenmixup.detectors import BlockInput
from tokenmixup.memory import Memory
from tokenmixup.passes import Pass
from tokenmixup.vertical import vertical_attention


def attend_as_projected(state: Pass, block: Any, tokens: Tensor, **given: Any) -> Tensor:
    """Of the block where HTM mixes, by the projections from which its saliency was computed."""
    entry = _entry_of(block, state)
    where = positions(block.attn, tokens.shape[1], given)
    q, k, v = project(block.attn, tokens, "qkv", where.rope, entry.projected)
    return attend(block.attn, tokens, q, k, v, where.bias)


def attend_and_remember(state: Pass, block: Any, tokens: Tensor, **given: Any) -> Tensor:
    """Of a source of VTM: its map, or else its queries and keys, tell the saliency as well.

    Positions may have dropout, which the saliency has not.
    """
    entry = _entry_of(block, state)
    where = positions(block.attn, tokens.shape[1], given)
    q, k, v = project(block.attn, tokens, "qkv", where.rope)
    weights = composed_map(block.attn, q, k, where.bias)
    if weights is None or where.bias is not None:
        entry.saliency = entry.saliency_by(q, k)
    else:
        entry.saliency = entry.saliency_of(weights)
    cast(Memory, state.memory).remember(entry)
    return attend(block.attn, tokens, q, k, v, where.bias, weights)


def attend_to_memory(state: Pass, block: Any, tokens: Tensor, **given: Any) -> Tensor:
    """Of the block of VTM."""
    entry, memory = _entry_of(block, state), cast(Memory, state.memory)
    where = positions(block.attn, tokens.shape[1], given)
    where = where.of_memory(torch.cat(memory.places, dim=1))
    remembered = block.norm1(torch.cat(memory.tokens, dim=1))
    return vertical_attention(block.attn, tokens, remembered, where, entry.projected)


def _entry_of(block: Any, state: Pass) -> BlockInput:
    entry = state.entry
    assert entry is not None and entry.blocks[entry.index] is block, "it is not watched"
    return entry
