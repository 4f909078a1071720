"""Sequence pooling (Hassani et al., 2021): the mean of tokens by learnt weights.

Letters: b batch, t tokens, d width.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tokenmixup.contexts import without_autocast


def sequence_pool(tokens: Tensor, score: nn.Linear) -> Tensor:
    """Softmax(score(X))^T X: `b t d` -> `b d`; `score` maps d to 1. In the tokens' own precision.

    Tokens get one gradient, of both the scores and the mean, where autograd would add two up.
    RuntimeError at a second derivative.
    """
    return cast(Tensor, _SequencePool.apply(tokens, score.weight, score.bias))


class _SequencePool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with without_autocast(x.device.type):
            # a CPU multiplies sample by sample faster than all tokens at once
            scores = x @ weight.to(x.dtype).expand(len(x), -1, -1).mT + bias.to(x.dtype)
            share = scores.softmax(dim=1)  # b t 1
            pooled = (share.mT @ x)[:, 0]
        ctx.save_for_backward(x, weight, share, pooled)
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight, share, pooled = ctx.saved_tensors
        with without_autocast(x.device.type):
            towards = grad[:, None] @ x.mT - (grad * pooled).sum(dim=1)[:, None, None]  # b 1 t
            of_score = share * towards.mT  # b t 1, through the softmax
            of_x = None
            if ctx.needs_input_grad[0]:
                of_x = (share * grad[:, None]).addcmul_(of_score, weight.to(x.dtype))
            of_weight = (of_score.mT @ x).sum(dim=0, dtype=weight.dtype)  # 1 d
            return of_x, of_weight, of_score.sum().to(weight.dtype).view(1)
