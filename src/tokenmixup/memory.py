"""What VTM carries from its sources to the block that attends to it, in one training pass.

Letters: b batch, n tokens with prefix, d width, kappa tokens of each source.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenmixup.attention import attend, positions, project
from tokenmixup.detectors import BlockInput
from tokenmixup.vertical import take_tokens, vertical_attention


@dataclass
class Memory:
    """The salient tokens of the blocks so far; `place` tells where `kappa` of them stand."""

    kappa: int
    place: Callable[[Tensor, int, int], Tensor]
    tokens: list[Tensor] = field(default_factory=list)  # b kappa d of each source
    places: list[Tensor] = field(default_factory=list)  # b kappa, where they stood in n
    source: BlockInput | None = None  # whose attention is about to tell its saliency

    def remember(self, entry: BlockInput) -> None:
        """Keeps the salient tokens of a block, now or once its attention has told them."""
        if entry.saliency is None:
            self.source = entry
            return
        places = self.place(entry.saliency, self.kappa, entry.num_prefix_tokens)
        self.tokens.append(take_tokens(entry.tokens, places))
        self.places.append(places)

    def attend_and_remember(self, block: Any, tokens: Tensor, **given: Any) -> Tensor:
        """Stands in for a source's attention: its queries and keys tell the saliency as well."""
        assert self.source is not None, "its input was remembered before"
        where = positions(block.attn, tokens.shape[1], given)
        q, k, v = project(block.attn, tokens, "qkv", where.rope)
        self.source.saliency = self.source.saliency_by(q, k)
        self.remember(self.source)
        return attend(block.attn, tokens, q, k, v, where.bias)

    def attend_to(self, block: Any, tokens: Tensor, **given: Any) -> Tensor:
        """Stands in for the VTM block's attention; `tokens` are layer-normed already."""
        where = positions(block.attn, tokens.shape[1], given)
        where = where.of_memory(torch.cat(self.places, dim=1))
        memory = block.norm1(torch.cat(self.tokens, dim=1))
        return vertical_attention(block.attn, tokens, memory, where)
