"""A training pass of whole models equals the paper's equations, and these equal sums by hand."""

import copy
from functools import partial
from typing import Any

import pytest
import torch

from tests.conftest import CLASSES, small_cct, small_vit, small_vit_lite
from tests.oracle import Oracle, gain_by_repetition, mix, most_salient
from tokenmixup import Output, attach, gain_matrix, training_loss

INF = float("inf")
ALL: dict[str, Any] = {"tau": INF, "rho": 0.002}  # every sample is mixed
PASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "htm, then vtm": (small_vit, {"htm": {"layer": 1, **ALL}, "vtm": {"layer": 2, "kappa": 2}}),
    "in one block": (small_cct, {"htm": {"layer": 2, **ALL}, "vtm": {"layer": 2, "kappa": 2}}),
    "vtm, then htm": (small_vit, {"htm": {"layer": 3, **ALL}, "vtm": {"layer": 1, "kappa": 2}}),
    "htm": (small_vit_lite, {"htm": {"layer": 1, **ALL, "rho": 0.01, "score_loss_weight": 0.5}}),
    "htm by the mean over queries": (small_cct, {"htm": {"layer": 1, **ALL, "rho": 0.004}}),
    "vtm": (small_cct, {"vtm": {"layer": 2, "kappa": 4}}),
    "some samples are easy": (
        small_cct,
        {"htm": {"layer": 0, "tau": 1.65, "rho": 0.0}, "vtm": {"layer": 3}},
    ),
    "several layers": (
        small_vit,
        {
            "htm": {"layer": [0, 2], "tau": INF, "rho": [0.002, 0.001]},
            "vtm": {"layer": [1, 3], "kappa": [2, 3]},
        },
    ),
    "all layers": (small_cct, {"htm": {"layer": [1, 2, 3], **ALL}, "vtm": {"layer": [1, 2]}}),
    "a memory without gradient": (
        small_vit,
        {
            "htm": {"layer": [1, 3], "tau": [1.62, INF], "rho": 0.0},
            "vtm": {"layer": [2, 3], "stop_gradient": True},
        },
    ),
    "vtm in each block": (small_vit_lite, {"vtm": {"layer": [1, 2, 3], "kappa": 2}}),
    "stochastic depth": (
        partial(small_cct, drop_path=0.5),
        {"htm": {"layer": 1, **ALL}, "vtm": {"layer": 2}},
    ),
}


def batch_for(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and soft targets; the last two images are equal, so that saliency ties."""
    generator = torch.Generator().manual_seed(1)
    size = 16 if hasattr(model, "tokenizer") else 32
    images = torch.randn(6, 3, size, size, generator=generator)
    images[5] = images[4]
    return images, torch.randn(6, CLASSES, generator=generator).softmax(dim=1)


@pytest.mark.parametrize("name", PASSES)
def test_a_training_pass_equals_the_equations(name: str):
    build, settings = PASSES[name]
    module = attach(build(), CLASSES, **settings).train()
    oracle, (images, targets) = Oracle(copy.deepcopy(module)).train(), batch_for(module.model)
    torch.manual_seed(3)
    output = module(images, targets)
    assert isinstance(output, Output)
    torch.manual_seed(3)
    expected = oracle(images, targets)
    torch.testing.assert_close(output.logits, expected.logits, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(output.targets, expected.targets, atol=1e-6, rtol=1e-5)
    assert len(output.layers) == len(expected.layers)
    for ours, theirs in zip(output.layers, expected.layers, strict=True):
        assert ours.layer == theirs.layer
        assert ours.mask.any()
        for field in ("is_easy", "mask"):
            assert torch.equal(getattr(ours, field), getattr(theirs, field)), field
        for field in ("score_logits", "difficulty", "saliency", "gain"):
            found = getattr(ours, field)
            written_out = getattr(theirs, field)
            torch.testing.assert_close(found, written_out, atol=1e-6, rtol=1e-4, msg=field)
    loss = training_loss(output)
    torch.testing.assert_close(loss, expected.loss, atol=1e-6, rtol=1e-5)
    loss.backward()
    expected.loss.backward()
    for (key, p), q in zip(module.named_parameters(), oracle.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None, key
        torch.testing.assert_close(p.grad, q.grad, atol=1e-5, rtol=1e-3, msg=key)


def test_equal_samples_give_each_other_nothing():
    """Where saliency ties nothing is gained, so nothing is replaced, with rho = 0 too."""
    module = attach(small_cct(), CLASSES, htm={"layer": 1, "tau": INF, "rho": 0.0}).train()
    images = torch.randn(1, 3, 16, 16).expand(4, -1, -1, -1)
    targets = torch.eye(CLASSES)[:4]
    output = module(images, targets)
    assert not output.mask.any()
    assert torch.equal(output.targets, targets)


@pytest.mark.parametrize("rho", [0.0, 0.02, INF])
def test_gain_forms_equal_the_written_out_sum(rho: float):
    saliency = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).softmax(dim=1)
    expected = torch.zeros(5, 5)
    for i in range(5):
        for j in range(5):
            pairs = zip(saliency[j], saliency[i], strict=True)
            expected[i, j] = sum(max(float(d - r) - rho, 0) for d, r in pairs)
    for form in (gain_matrix, gain_by_repetition):
        found = form(saliency, rho)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5, check_dtype=False)


def test_mix_by_hand():
    """Sample 0 takes token 1 of sample 1, hard sample 1 stays; token values identify the sample."""
    saliency = torch.tensor([[0.6, 0.1, 0.3], [0.1, 0.8, 0.1]])
    tokens = torch.tensor([[9.0, 1.0, 2.0, 3.0], [8.0, 4.0, 5.0, 6.0]])[..., None]
    is_easy = torch.tensor([True, False])
    found = mix(tokens, torch.eye(2), saliency, is_easy, 0.1, prefix=1)
    x, targets, mixed_saliency, mask, donor = found
    assert donor.tolist() == [1, 1]
    assert x[..., 0].tolist() == [[9, 1, 5, 3], [8, 4, 5, 6]]
    assert mask.tolist() == [[False, True, False], [False] * 3]
    torch.testing.assert_close(mixed_saliency[0], torch.tensor([0.6, 0.8, 0.3]))
    torch.testing.assert_close(targets[0], torch.tensor([0.9 / 1.7, 0.8 / 1.7]))
    assert targets[1].tolist() == [0, 1]


def test_most_salient_excludes_the_prefix():
    tokens = torch.tensor([[9.0, 1.0, 2.0, 3.0]])[..., None]
    chosen = most_salient(tokens, torch.tensor([[0.2, 0.1, 0.7]]), 2, prefix=1)
    assert chosen.flatten().tolist() == [3, 1]
