"""Speed-ups of a training step. A reader of the method may skip this file.

Tokens are replaced (Eq. 10) by one gather of rows. Norm and projections treat tokens independently,
so the projections that HTM's block computes for its saliency are moved like the tokens, instead of
being computed again.
Letters: b batch, n tokens with prefix, t spatial tokens.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Exchange(NamedTuple):
    """An exchange of tokens between samples, as row indices into `(b n)`."""

    read: Tensor  # (b n) int64, index of the row that each row is read from
    order: Tensor | None  # b int64, new order of the samples; None if unchanged

    def __call__(self, x: Tensor) -> Tensor:
        """Replaces tokens of `b n d` by those of the donors."""
        return x.flatten(0, 1).index_select(0, self.read).view_as(x)

    def reorder(self, x: Tensor) -> Tensor:
        """Brings `b ...`, one row per sample, into the new order of the samples."""
        return x if self.order is None else x[self.order]


def exchange_of(donor: Tensor, mask: Tensor, n: int, order: Tensor | None = None) -> Exchange:
    """Returns the exchange that takes the spatial tokens in `mask`, `b t`, from `donor`, `b`.

    Every row is gathered, kept ones from themselves: gathering only replaced rows would make the
    host wait for their number.
    """
    rows = torch.arange(len(mask) * n, device=mask.device).view(-1, n)  # b n
    replace = F.pad(mask, (n - mask.shape[1], 0))  # b n
    read = torch.where(replace, rows[donor], rows)
    read = read if order is None else read[order]
    return Exchange(read.flatten(), order)


def copy_to_host(*tensors: Tensor) -> list[Tensor]:
    """Copies tensors to the host; from a GPU asynchronously, with a single wait for all of them."""
    copies = [x.to("cpu", non_blocking=x.is_cuda) for x in tensors]
    if tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies
