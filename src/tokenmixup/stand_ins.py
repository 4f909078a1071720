"""What stands in for a block's attention in a training pass, and computes the same and more.

`tokens` are layer-normed already, `b n d`; `given` are the block's other arguments.
"""

from typing import Any

import torch
from torch import Tensor

from tokenmixup.attention import attend, positions, project
from tokenmixup.passes import Pass
from tokenmixup.vertical import vertical_attention


def attend_as_projected(state: Pass, block: Any, tokens: Tensor, **given: Any) -> Tensor:
    """Of the block where HTM mixes, whose projections have told the saliency."""
    assert state.entry is not None
    where = positions(block.attn, tokens.shape[1], given)
    q, k, v = project(block.attn, tokens, "qkv", where.rope, state.entry.projected)
    return attend(block.attn, tokens, q, k, v, where.bias)


def attend_and_remember(state: Pass, block: Any, tokens: Tensor, **given: Any) -> Tensor:
    """Of a source of VTM: its queries and keys tell the saliency as well."""
    assert state.entry is not None and state.memory is not None
    where = positions(block.attn, tokens.shape[1], given)
    q, k, v = project(block.attn, tokens, "qkv", where.rope)
    state.entry.saliency = state.entry.saliency_by(q, k)
    state.memory.remember(state.entry)
    return attend(block.attn, tokens, q, k, v, where.bias)


def attend_to_memory(state: Pass, block: Any, tokens: Tensor, **given: Any) -> Tensor:
    """Of the block of VTM."""
    assert state.entry is not None and state.memory is not None
    where = positions(block.attn, tokens.shape[1], given)
    where = where.of_memory(torch.cat(state.memory.places, dim=1))
    memory = block.norm1(torch.cat(state.memory.tokens, dim=1))
    return vertical_attention(block.attn, tokens, memory, where, state.entry.projected)
