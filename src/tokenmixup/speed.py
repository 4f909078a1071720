"""What saves a training step work. A reader of the method may skip it.

Norm and projections act on each token alone. So what HTM's block projects for its saliency is kept,
and moved as the tokens are: only its gradient is left to compute. Letters: b batch, n tokens with
prefix, t spatial tokens.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokenmixup.contexts import without_autocast


class Exchange(NamedTuple):
    """Who gives which token to whom, as rows of `b n`."""

    read: Tensor  # (b n) int64, the row that each one is read from
    order: Tensor | None  # b int64, where samples have moved

    def __call__(self, x: Tensor) -> Tensor:
        """`b n d` with the donors' rows in their places."""
        return x.flatten(0, 1).index_select(0, self.read).view_as(x)

    def reorder(self, x: Tensor) -> Tensor:
        """`b ...`, one row of each sample, in the order of the samples."""
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


def known_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor, parts: int = 1
) -> tuple[Tensor, ...]:
    """Returns `result`, differentiated as if it were `F.linear(x, weight, bias)`.

    `b n d` -> `b n p`, in `parts` equal chunks of p. Their gradients are multiplied one by one,
    which saves putting them together, but in half precision. RuntimeError at a second derivative.
    """
    x, weight = x.to(result.dtype), weight.to(result.dtype)
    bias = None if bias is None else bias.to(result.dtype)
    return cast(tuple[Tensor, ...], _KnownLinear.apply(x, weight, bias, result, parts))


class _KnownLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor, parts: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        return result.chunk(parts, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = [grad.flatten(0, -2) for grad in grads]
        if len(rows) > 1 and x.dtype.itemsize < 4:  # would round between the parts
            rows = [torch.cat(rows, dim=1)]
        of_x = of_weight = of_bias = None
        with without_autocast(x.device.type):
            if ctx.needs_input_grad[0]:
                first, *others = zip(rows, weight.chunk(len(rows)), strict=True)
                of_x = first[0] @ first[1]
                for grad, part in others:
                    of_x.addmm_(grad, part)
                of_x = of_x.view_as(x)
            if ctx.needs_input_grad[1]:
                of_weight = _together([grad.mT @ x.flatten(0, -2) for grad in rows])
            if ctx.needs_input_grad[2]:
                of_bias = _together([grad.sum(dim=0) for grad in rows])
        return of_x, of_weight, of_bias, None, None


def _together(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
