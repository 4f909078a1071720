import pytest
import torch
from torch import nn
from torch.func import functional_call

from tokenmixup.pooling import sequence_pool


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, nn.Linear]:
    torch.manual_seed(0)
    return torch.randn(3, 5, 8, dtype=dtype, requires_grad=True), nn.Linear(8, 1, dtype=dtype)


def by_autograd(tokens: torch.Tensor, score: nn.Linear) -> torch.Tensor:
    return (score(tokens).softmax(dim=1) * tokens).sum(dim=1)


def test_sequence_pool_is_the_mean_by_softmax_of_the_scores():
    tokens, score = inputs()
    torch.testing.assert_close(sequence_pool(tokens, score), by_autograd(tokens, score))


def test_gradients_are_those_of_finite_differences():
    tokens, score = inputs(torch.float64)

    def pool(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional_call(Pool(score), {"score.weight": weight, "score.bias": bias}, (x,))

    assert torch.autograd.gradcheck(pool, (tokens, *score.parameters()))


class Pool(nn.Module):
    def __init__(self, score: nn.Linear):
        super().__init__()
        self.score = score

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sequence_pool(x, self.score)


@pytest.mark.parametrize("tokens_dtype", [torch.float32, torch.bfloat16])
def test_autocast_leaves_the_precision_of_the_tokens(tokens_dtype: torch.dtype):
    tokens, score = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        pooled = sequence_pool(tokens.to(tokens_dtype), score)
        found = torch.autograd.grad(pooled.sum(), [tokens, score.weight])
    assert pooled.dtype == tokens_dtype
    exact, same_score = inputs()
    loss = by_autograd(exact, same_score).sum()
    tolerance = 1e-5 if tokens_dtype == torch.float32 else 0.05
    for ours, theirs in zip(
        found, torch.autograd.grad(loss, [exact, same_score.weight]), strict=True
    ):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def test_a_second_derivative_is_refused():
    tokens, score = inputs()
    loss = sequence_pool(tokens, score).square().sum()
    (first,) = torch.autograd.grad(loss, tokens, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
