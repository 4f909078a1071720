"""A linear layer whose result is known before it is asked for."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokenmixup.contexts import without_autocast


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
