"""What VTM carries from its sources to the block that attends to it, in one training pass.

Letters: b batch, n tokens with prefix, d width, kappa tokens of each source.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from tokenmixup.detectors import BlockInput
from tokenmixup.vertical import take_tokens


@dataclass
class Memory:
    """The salient tokens of the blocks so far; `place` tells where `kappa` of them stand."""

    kappa: int
    place: Callable[[Tensor, int, int], Tensor]
    tokens: list[Tensor] = field(default_factory=list)  # b kappa d of each source
    places: list[Tensor] = field(default_factory=list)  # b kappa, where they stood in n

    def remember(self, entry: BlockInput) -> None:
        """Keeps the salient tokens of a block whose saliency is known."""
        assert entry.saliency is not None
        places = self.place(entry.saliency, self.kappa, entry.num_prefix_tokens)
        self.tokens.append(take_tokens(entry.tokens, places))
        self.places.append(places)
