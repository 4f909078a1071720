"""A training pass of whole models equals the paper's equations, and these equal sums by hand."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.conftest import CLASSES, gradients_of, normal, small_cct, small_vit, small_vit_lite
from tests.oracle import Oracle, donors_of, gain_by_repetition, mix_all, most_salient
from tokenmixup import Output, attach, training_loss

INF = float("inf")


class Pass(NamedTuple):
    build: Callable[..., Any]
    htm: dict[str, Any] | None = None
    vtm: dict[str, Any] | None = None


def htm(layer: Any, tau: Any = INF, rho: Any = 0.002, **more: Any) -> dict[str, Any]:
    """By default every sample is mixed."""
    return {"layer": layer, "tau": tau, "rho": rho, **more}


def vtm(layer: Any, **more: Any) -> dict[str, Any]:
    return {"layer": layer, **more}


PASSES: dict[str, Pass] = {
    "htm, then vtm": Pass(small_vit, htm(1), vtm(2, kappa=2)),
    "htm, then vtm, average pooling": Pass(
        partial(small_vit, global_pool="avg"), htm(1), vtm(2, kappa=2)
    ),
    "in one block": Pass(small_cct, htm(2), vtm(2, kappa=2)),
    "vtm, then htm": Pass(small_vit, htm(3), vtm(1, kappa=2)),
    "htm": Pass(small_vit_lite, htm(1, rho=0.01, score_loss_weight=0.5)),
    "htm by the mean over queries": Pass(small_cct, htm(1, rho=0.004)),
    "vtm": Pass(small_cct, vtm=vtm(2, kappa=4)),
    "some samples are easy": Pass(small_cct, htm(0, tau=1.65, rho=0.0), vtm(3)),
    "several layers": Pass(small_vit, htm([0, 2], rho=[0.002, 0.001]), vtm([1, 3], kappa=[2, 3])),
    "all layers": Pass(small_cct, htm([1, 2, 3]), vtm([1, 2])),
    "a memory without gradient": Pass(
        small_vit, htm([1, 3], tau=[1.62, INF], rho=0.0), vtm([2, 3], stop_gradient=True)
    ),
    "vtm in each block": Pass(small_vit_lite, vtm=vtm([1, 2, 3], kappa=2)),
    "stochastic depth": Pass(partial(small_cct, drop_path=0.5), htm(1), vtm(2)),
}


def batch_for(model: Any) -> tuple[Tensor, Tensor]:
    """Images and soft targets; the last two images are equal, so that saliency ties."""
    generator = torch.Generator().manual_seed(1)
    size = 16 if hasattr(model, "tokenizer") else 32
    images = torch.randn(6, 3, size, size, generator=generator)
    images[5] = images[4]
    targets = torch.randn(6, CLASSES, generator=generator).softmax(dim=1)
    return images.double(), targets.double()


@pytest.mark.parametrize("name", PASSES)
def test_a_training_pass_equals_the_equations(name: str):
    of = PASSES[name]
    module = attach(of.build().double(), CLASSES, htm=of.htm, vtm=of.vtm).train()
    oracle = Oracle(copy.deepcopy(module)).train()
    images, targets = batch_for(module.model)
    torch.manual_seed(3)
    output = module(images, targets)
    assert isinstance(output, Output)
    torch.manual_seed(3)
    expected = oracle(images, targets)
    assert_close(output.logits, expected.logits, atol=1e-6, rtol=0)
    assert_close(output.targets, expected.targets, atol=1e-6, rtol=1e-5)
    for ours, theirs in zip(output.layers, expected.layers, strict=True):
        assert ours.layer == theirs.index
        assert ours.mask.any()
        assert torch.equal(ours.is_easy, theirs.is_easy)
        assert torch.equal(ours.mask, theirs.mix.mask)
        assert_close(ours.score_logits, theirs.score_logits, atol=1e-6, rtol=1e-4)
        assert_close(ours.difficulty.double(), theirs.difficulty, atol=1e-6, rtol=1e-4)
        assert_close(ours.saliency, theirs.saliency, atol=1e-6, rtol=1e-4)
        assert_close(ours.gain, theirs.gain, atol=1e-6, rtol=1e-4)
    loss = training_loss(output)
    assert_close(loss.double(), expected.loss, atol=1e-6, rtol=1e-5)
    loss.backward()
    expected.loss.backward()
    gradients = gradients_of(module)
    assert len(gradients) == len(list(module.parameters()))
    assert_close(gradients, gradients_of(oracle), atol=1e-5, rtol=1e-3)


def test_equal_samples_give_each_other_nothing():
    """Where saliency ties nothing is gained, so nothing is replaced, with rho = 0 too."""
    module = attach(small_cct(), CLASSES, htm=htm(1, rho=0.0)).train()
    images = torch.randn(1, 3, 16, 16).expand(4, -1, -1, -1)
    targets = torch.eye(CLASSES)[:4]
    output = module(images, targets)
    assert not output.mask.any()
    assert torch.equal(output.targets, targets)


@pytest.mark.parametrize("rho", [0.0, 0.02, INF])
def test_gain_by_repetition_equals_the_written_out_sum(rho: float):
    saliency = normal(5, 7, seed=1).softmax(dim=1)
    expected = torch.zeros(5, 5)
    for receiver in range(5):
        for donor in range(5):
            for token in range(7):
                gap = saliency[donor, token] - saliency[receiver, token]
                expected[receiver, donor] += max(float(gap) - rho, 0)
    found = gain_by_repetition(saliency, rho)
    assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_mix_by_hand():
    """Sample 0 takes token 1 of sample 1, hard sample 1 stays; token values identify the sample."""
    saliency = torch.tensor([[0.6, 0.1, 0.3], [0.1, 0.8, 0.1]])
    tokens = torch.tensor([[9.0, 1.0, 2.0, 3.0], [8.0, 4.0, 5.0, 6.0]])[..., None]
    is_easy = torch.tensor([True, False])
    donor = donors_of(saliency, is_easy, 0.1)
    assert donor.tolist() == [1, 1]
    mixed = mix_all(tokens, torch.eye(2), saliency, donor, 0.1, prefix=1)
    assert mixed.tokens[..., 0].tolist() == [[9, 1, 5, 3], [8, 4, 5, 6]]
    assert mixed.mask.tolist() == [[False, True, False], [False, False, False]]
    assert_close(mixed.saliency[0], torch.tensor([0.6, 0.8, 0.3]))
    assert_close(mixed.targets[0], torch.tensor([0.9 / 1.7, 0.8 / 1.7]))
    assert mixed.targets[1].tolist() == [0, 1]


def test_most_salient_excludes_the_prefix():
    tokens = torch.tensor([[9.0, 1.0, 2.0, 3.0]])[..., None]
    chosen = most_salient(tokens, torch.tensor([[0.2, 0.1, 0.7]]), 2, prefix=1)
    assert chosen.flatten().tolist() == [3, 1]
