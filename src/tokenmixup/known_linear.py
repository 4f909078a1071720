"""A linear layer whose result is known before it is asked for."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokenmixup.contexts import without_autocast


def known_linear(x: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor) -> Tensor:
    """`F.linear(x, weight, bias)`, whose values are taken from `result`, with its gradient.

    `b n d` -> `b n k`, computed back in the precision of `result`. RuntimeError at a second
    derivative.
    """
    x, weight = x.to(result.dtype), weight.to(result.dtype)
    bias = None if bias is None else bias.to(result.dtype)
    return cast(Tensor, _KnownLinear.apply(x, weight, bias, result))


class _KnownLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return result.view_as(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grads: list[Tensor | None] = [None] * 4
        with without_autocast(x.device.type):
            if ctx.needs_input_grad[0]:
                grads[0] = grad @ weight
            if ctx.needs_input_grad[1]:
                grads[1] = grad.flatten(0, -2).mT @ x.flatten(0, -2)
            if ctx.needs_input_grad[2]:
                grads[2] = grad.flatten(0, -2).sum(dim=0)
        return tuple(grads)
