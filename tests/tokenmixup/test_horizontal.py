"""Algorithm 1 against a plain, slow restatement of it, and its properties."""

from itertools import permutations
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tokenmixup import HTM, gain_matrix, mix_horizontal
from tokenmixup.horizontal import PAPER, HorizontalMix, Rules, exchanged, rows_of

RHOS = (0.0, 0.005, 0.02, 0.2)


class Batch(NamedTuple):
    tokens: Tensor
    targets: Tensor
    saliency: Tensor
    is_easy: Tensor
    num_prefix_tokens: int


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    b, t, c = draw(st.integers(1, 5)), draw(st.integers(1, 12)), draw(st.integers(2, 5))
    prefix = draw(st.integers(0, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sharpness = draw(st.sampled_from([0.1, 1.0, 5.0]))
    return Batch(
        tokens=torch.randn(b, prefix + t, 4, generator=generator),
        targets=torch.randn(b, c, generator=generator).softmax(dim=1),
        saliency=(sharpness * torch.randn(b, t, generator=generator)).softmax(dim=1),
        is_easy=torch.tensor(draw(st.lists(st.booleans(), min_size=b, max_size=b))),
        num_prefix_tokens=prefix,
    )


def mix_easy(
    tokens: Tensor,
    targets: Tensor,
    saliency: Tensor,
    is_easy: Tensor,
    rho: float,
    rules: Rules = PAPER,
) -> HorizontalMix:
    """Mixes with the easy samples told: their difficulty is 0, that of the others 1."""
    difficulty = 1 - is_easy.float()
    return mix_horizontal(tokens, targets, saliency, difficulty, 1.0, rho, rules)


def mix(batch: Batch, rho: float) -> HorizontalMix:
    return mix_easy(*batch[:4], rho)


@given(batches(), st.sampled_from(RHOS))
def test_mix_horizontal_equals_the_algorithm_written_out(batch: Batch, rho: float):
    """Lines 5-8 of Algorithm 1, one sample and one token at a time, with the donors found."""
    found = mix(batch, rho)
    for i in range(len(batch.tokens)):
        j = int(found.donor[i])
        tokens, kept, taken = batch.tokens[i].clone(), 0.0, 0.0
        for t in range(batch.saliency.shape[1]):
            own, other = batch.saliency[i, t], batch.saliency[j, t]
            replaced = bool(batch.is_easy[i]) and bool(other - own > rho)
            assert bool(found.mask[i, t]) == replaced
            if replaced:
                tokens[batch.num_prefix_tokens + t] = batch.tokens[j, batch.num_prefix_tokens + t]
                taken += float(other)
            else:
                kept += float(own)
        ratio = kept / (kept + taken) if taken else 1.0
        assert torch.equal(found.tokens[i], tokens)
        assert float(found.keep_ratio[i]) == pytest.approx(ratio, abs=1e-6)
        expected = ratio * batch.targets[i] + (1 - ratio) * batch.targets[j]
        torch.testing.assert_close(found.targets[i], expected, atol=1e-6, rtol=1e-5)


@given(batches(), st.sampled_from(RHOS))
def test_mix_horizontal_matches_easy_samples_best_and_hard_ones_with_themselves(batch, rho):
    found = mix(batch, rho)
    easy = batch.is_easy
    assert torch.equal(found.donor[~easy], torch.arange(len(easy))[~easy])
    donors = found.donor[easy]
    assert donors.unique().numel() == donors.numel()
    gain = gain_matrix(batch.saliency, rho)[easy]
    rows = range(len(gain))
    best = max(sum(gain[i, p[i]] for i in rows) for p in permutations(range(len(easy)), len(gain)))
    reached = sum(gain[i, donors[i]] for i in rows)
    assert float(reached) == pytest.approx(float(best), abs=1e-5)


@given(batches())
def test_mix_horizontal_with_infinite_rho_changes_no_bit(batch: Batch):
    found = mix(batch, float("inf"))
    assert torch.equal(found.tokens, batch.tokens)
    assert torch.equal(found.targets, batch.targets)
    assert not found.mask.any()


@given(batches(), st.sampled_from(RHOS))
def test_mix_horizontal_of_hard_samples_changes_no_bit(batch: Batch, rho: float):
    found = mix(batch._replace(is_easy=torch.zeros_like(batch.is_easy)), rho)
    assert torch.equal(found.tokens, batch.tokens)
    assert torch.equal(found.targets, batch.targets)


@pytest.mark.parametrize(("easy", "rho"), [(0, 0.0), (3, float("inf"))])
def test_where_nothing_is_replaced_a_saliency_that_is_not_finite_changes_nothing(
    easy: int, rho: float
):
    tokens, saliency = torch.randn(3, 4, 2), torch.full((3, 4), float("nan"))
    found = mix_easy(tokens, torch.eye(3), saliency, torch.arange(3) < easy, rho)
    assert torch.equal(found.tokens, tokens) and torch.equal(found.targets, torch.eye(3))
    assert not found.gain.any() and not found.mask.any()


def test_saliency_of_more_than_the_tokens_is_refused():
    with pytest.raises(ValueError, match="saliency of 5 tokens, but 4 to mix"):
        mix_easy(torch.randn(2, 4, 3), torch.eye(2), torch.rand(2, 5), torch.ones(2).bool(), 0.0)


def test_class_indices_as_targets_are_refused():
    classes, is_easy = torch.arange(2), torch.ones(2).bool()
    with pytest.raises(ValueError, match=r"targets \[2\]: must be probabilities b c"):
        mix_easy(torch.randn(2, 4, 3), classes, torch.rand(2, 4), is_easy, 0.0)


def test_the_gradient_of_taken_tokens_goes_to_their_donors():
    tokens = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    donor, mask = torch.tensor([2, 0, 1]), torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 1]]).bool()
    assert torch.autograd.gradcheck(exchanged, (tokens, rows_of(donor, mask, 4)))


def test_mix_horizontal_takes_rows_of_the_donor_at_the_same_place():
    """Payload: every token carries (sample, place), so a wrong row would show."""
    b, t = 6, 10
    sample, place = torch.meshgrid(torch.arange(b), torch.arange(t + 1), indexing="ij")
    tokens = torch.stack([sample, place], dim=-1).float()
    saliency = (3 * torch.randn(b, t, generator=torch.Generator().manual_seed(1))).softmax(dim=1)
    targets = torch.eye(b)
    easy = torch.tensor([True, True, False, True, False, True])
    found = mix_easy(tokens, targets, saliency, easy, 0.005)
    assert found.mask.any()
    assert torch.equal(found.tokens[:, :, 1], tokens[:, :, 1])
    assert torch.equal(found.tokens[:, 0], tokens[:, 0])
    source = found.tokens[:, 1:, 0]
    expected = torch.where(found.mask, found.donor[:, None], torch.arange(b)[:, None])
    assert torch.equal(source, expected.float())


def test_mix_horizontal_keeps_the_label_where_kept_and_taken_saliency_are_zero():
    saliency = torch.zeros(2, 3)
    found = mix_easy(
        torch.randn(2, 3, 4), torch.eye(2), saliency, torch.ones(2, dtype=torch.bool), 0.0
    )
    assert torch.equal(found.targets, torch.eye(2))
    assert torch.equal(found.keep_ratio, torch.ones(2, 1))


def test_mix_horizontal_reads_saliency_in_float32_without_gradient():
    saliency = torch.rand(4, 6).softmax(dim=1)
    batch = torch.randn(4, 6, 3), torch.eye(4)
    easy = torch.ones(4, dtype=torch.bool)
    found = mix_easy(*batch, saliency.clone().requires_grad_(), easy, 0.0)
    assert not found.targets.requires_grad
    low = saliency.bfloat16()
    assert torch.equal(
        mix_easy(*batch, low, easy, 0.0).keep_ratio,
        mix_easy(*batch, low.float(), easy, 0.0).keep_ratio,
    )


def test_mix_horizontal_passes_gradients_to_donors():
    tokens = torch.zeros(2, 2, 1, requires_grad=True)
    saliency = torch.tensor([[0.9, 0.1], [0.1, 0.9]])
    easy = torch.tensor([True, False])
    found = mix_easy(tokens, torch.eye(2), saliency, easy, 0.0)
    found.tokens[0].sum().backward()
    assert tokens.grad is not None
    assert tokens.grad.squeeze(-1).tolist() == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("num_classes", "num_tokens", "tau", "rho"),
    [(100, 256, 2.0, 0.005), (10, 64, 1.0, 0.02), (1000, 196, 3.0, 0.0065)],
)
def test_auto_thresholds_fit_classes_and_tokens(
    num_classes: int, num_tokens: int, tau: float, rho: float
):
    """The first are those published for CIFAR-100, and for CIFAR-10 tau alone."""
    htm = HTM(layer=0)
    assert (htm.tau, htm.rho) == ("auto", "auto")
    assert htm.for_classes(num_classes).tau == pytest.approx(tau)
    assert htm.rho_for(num_tokens) == pytest.approx(rho, abs=5e-5)
    layered = HTM(layer=[0, 1], tau=["auto", 4], rho=[0.5, "auto"]).for_classes(num_classes)
    assert [x.tau for x in layered.each.values()] == pytest.approx([tau, 4.0])
    assert layered.rho_for(num_tokens) == pytest.approx([0.5, rho], abs=5e-5)
    assert layered.each[0].rho_for(num_tokens) == 0.5
