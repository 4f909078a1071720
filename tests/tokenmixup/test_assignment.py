from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linear_sum_assignment

from tokenmixup import assignment, gain_matrix, optimal_assignment


def gain_by_definition(saliency: torch.Tensor, rho: float) -> torch.Tensor:
    difference = saliency.double()[None, :, :] - saliency.double()[:, None, :]  # i j t
    return (difference - rho).clamp(min=0).sum(dim=2)


saliencies = arrays(
    np.float32,
    st.tuples(st.integers(1, 8), st.integers(1, 20)),
    elements=st.floats(0, 1, width=32),
)


@given(saliencies, st.sampled_from([0.0, 1e-4, 0.005, 0.3, 1.0]))
def test_gain_matrix_equals_its_definition(saliency: np.ndarray, rho: float):
    gain = gain_matrix(torch.from_numpy(saliency), rho)
    expected = gain_by_definition(torch.from_numpy(saliency), rho)
    torch.testing.assert_close(gain, expected, atol=1e-5, rtol=1e-5)
    assert (gain.diagonal() == 0).all()
    assert (gain >= 0).all()


def test_gain_matrix_is_receiver_by_donor():
    saliency = torch.tensor([[0.1, 0.9], [0.5, 0.5]])
    gain = gain_matrix(saliency, 0.1)
    torch.testing.assert_close(gain, torch.tensor([[0.0, 0.3], [0.3, 0.0]]).double())
    richer = gain_matrix(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), 0.0)
    torch.testing.assert_close(richer, torch.tensor([[0.0, 2.0], [0.0, 0.0]]).double())


def test_gain_matrix_with_infinite_rho_is_zero():
    assert gain_matrix(torch.rand(4, 6), float("inf")).eq(0).all()


@given(
    arrays(
        np.float32,
        st.integers(1, 6).flatmap(lambda b: st.tuples(st.integers(1, b), st.just(b))),
        elements=st.floats(0, 2, width=32),
    )
)
def test_optimal_assignment_equals_brute_force(gain: np.ndarray):
    k, b = gain.shape
    donor = optimal_assignment(torch.from_numpy(gain)).numpy()
    assert len(set(donor.tolist())) == k
    best = max(sum(gain[i, p[i]] for i in range(k)) for p in permutations(range(b), k))
    assert gain[np.arange(k), donor].sum() == pytest.approx(best, abs=1e-5)


@given(
    arrays(
        np.float64,
        st.integers(1, 6).flatmap(lambda b: st.tuples(st.integers(1, b), st.just(b))),
        elements=st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1e300),
    )
)
def test_a_reduced_problem_has_the_same_solution(gain: np.ndarray):
    k, b = gain.shape
    with np.errstate(all="raise", under="ignore"):
        donor = linear_sum_assignment(assignment._reduced(gain), maximize=True)[1][:k]
    best = max(sum(gain[i, p[i]] for i in range(k)) for p in permutations(range(b), k))
    assert gain[np.arange(k), donor].sum() == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("receivers", [64, 88, 90, 115, 128])
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 3.0])  # from nearly uniform saliency on
def test_donors_of_large_batches_are_those_of_the_solver_alone(receivers: int, sharpness: float):
    generator = torch.Generator().manual_seed(receivers)
    saliency = (sharpness * torch.randn(128, 64, generator=generator)).softmax(dim=1)
    gain = gain_matrix(saliency, 0.0005)[:receivers]
    expected = linear_sum_assignment(gain.numpy(), maximize=True)[1]
    assert optimal_assignment(gain).tolist() == expected.tolist()


@pytest.mark.parametrize("receivers", [90, 100])
def test_tied_donors_of_large_batches_gain_as_much_as_the_solver_alone(receivers: int):
    gain = np.random.default_rng(0).integers(0, 4, (receivers, 100)).astype(float)
    assert assignment._is_reducible(gain)
    donors = optimal_assignment(torch.from_numpy(gain)).numpy()
    assert len(set(donors)) == receivers
    best = gain[linear_sum_assignment(gain, maximize=True)].sum()
    assert gain[np.arange(receivers), donors].sum() == best


def test_only_large_problems_with_many_gains_are_reduced():
    gain = np.random.default_rng(0).random((100, 100))
    assert assignment._is_reducible(gain) and assignment._is_reducible(gain[:70])
    assert not assignment._is_reducible(gain[:69])
    assert not assignment._is_reducible(gain[:95, :95])
    assert not assignment._is_reducible(np.where(gain < 0.97, 0, gain))
    assert not assignment._is_reducible(1e-16 * gain)


def test_optimal_assignment_of_nobody_is_empty():
    donor = optimal_assignment(torch.zeros(0, 5))
    assert donor.shape == (0,)
    assert donor.dtype == torch.int64


def test_optimal_assignment_takes_bf16_and_gradients():
    assert optimal_assignment(torch.eye(3).bfloat16()).tolist() == [0, 1, 2]
    assert optimal_assignment(torch.eye(3).requires_grad_()).tolist() == [0, 1, 2]


def test_gain_matrix_is_exact_with_many_tokens():
    saliency = (0.1 * torch.randn(8, 4096, generator=torch.Generator().manual_seed(0))).softmax(1)
    expected = gain_by_definition(saliency, 0.005)
    torch.testing.assert_close(gain_matrix(saliency, 0.005), expected, atol=1e-12, rtol=1e-9)


def test_optimal_assignment_refuses_more_receivers_than_donors():
    with pytest.raises(ValueError, match="3 receivers"):
        optimal_assignment(torch.zeros(3, 2))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_optimal_assignment_refuses_gains_that_are_not_finite(bad: float):
    gain = torch.zeros(2, 3)
    gain[1, 2] = bad
    with pytest.raises(FloatingPointError, match="not finite"):
        optimal_assignment(gain)
