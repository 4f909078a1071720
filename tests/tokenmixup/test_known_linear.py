"""Against torch's own linear layer."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmixup.speed import known_linear


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, nn.Linear]:
    torch.manual_seed(0)
    return torch.randn(2, 3, 4, dtype=dtype, requires_grad=True), nn.Linear(4, 6, dtype=dtype)


def test_values_are_the_given_ones_which_get_no_gradient():
    x, layer = inputs()
    result = torch.randn(2, 3, 6, requires_grad=True)
    (found,) = known_linear(x, layer.weight, layer.bias, result)
    assert torch.equal(found, result)
    found.sum().backward()
    assert result.grad is None and x.grad is not None


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("frozen", [(), ("x",), ("weight",), ("bias",), ("no bias",)])
def test_gradients_are_those_of_finite_differences(frozen: tuple[str, ...], parts: int):
    x, layer = inputs(torch.float64)
    bias = None if "no bias" in frozen else layer.bias
    for name, tensor in (("x", x), ("weight", layer.weight), ("bias", layer.bias)):
        tensor.requires_grad_(name not in frozen)

    def known(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        with torch.no_grad():
            result = F.linear(x, weight, bias)
        return known_linear(x, weight, bias, result, parts)

    assert torch.autograd.gradcheck(known, (x, layer.weight, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_gradient_is_that_of_the_layer(dtype: torch.dtype):
    x, layer = inputs()
    gradients = []
    for is_known in (False, True):
        with torch.autocast("cpu", dtype):
            out = layer(x)
            if is_known:
                out = torch.cat(known_linear(x, layer.weight, layer.bias, out.detach(), 3), dim=-1)
        assert out.dtype == dtype
        gradients.append(torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()]))
    for theirs, ours in zip(*gradients, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs)
