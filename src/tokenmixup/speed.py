"""What saves a training step work. A reader of the method may skip it.

Tokens are replaced (Eq. 10) by one gather of rows. Norm and projections act on each token alone: so
what HTM's block projects for its saliency moves as the tokens do, and is not computed again.
Letters: b batch, n tokens with prefix, t spatial tokens.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Exchange(NamedTuple):
    """Who gives which token to whom, as rows of `b n`."""

    read: Tensor  # (b n) int64, the row that each one is read from
    order: Tensor | None  # b int64, where samples have moved

    def __call__(self, x: Tensor) -> Tensor:
        """`b n d` with the donors' rows in their places."""
        return x.flatten(0, 1).index_select(0, self.read).view_as(x)

    def reorder(self, x: Tensor) -> Tensor:
        """`b ...`, one row per sample, in the order in which the samples now are."""
        return x if self.order is None else x[self.order]


def exchange_of(donor: Tensor, mask: Tensor, n: int, order: Tensor | None = None) -> Exchange:
    """The exchange by `donor`, `b`, of the spatial tokens in `mask`, `b t`.

    All rows are read, those that stay from themselves: a GPU would have to wait for the number of
    the replaced ones.
    """
    rows = torch.arange(len(mask) * n, device=mask.device).view(-1, n)  # b n
    replace = F.pad(mask, (n - mask.shape[1], 0))  # b n
    read = torch.where(replace, rows[donor], rows)
    read = read if order is None else read[order]
    return Exchange(read.flatten(), order)


def copy_to_host(*found: Tensor) -> list[Tensor]:
    """From a GPU by asynchronous copies into pinned memory, then one wait for the stream."""
    copies = [x.to("cpu", non_blocking=x.is_cuda) for x in found]
    if found[0].is_cuda:
        torch.cuda.current_stream(found[0].device).synchronize()
    return copies
