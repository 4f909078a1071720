"""Gain matrices to try an assignment on, and the check of its result."""

import pytest
import torch

from scripts.on_gpu.matrices import Matrix, deficit, matrices
from tokenmixup.assignment import optimal_donors


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("b", [1, 2, 33])
def test_scipys_donors_are_optimal_in_all_kinds(b: int, share: float):
    found = [*matrices(b, share)]
    assert len({matrix.kind for matrix in found}) == len(found) == 19
    for matrix in found:
        assert matrix.gain.shape == (b, b) and matrix.is_easy.sum() == round(share * b)
        donor = optimal_donors(matrix.gain, matrix.is_easy)
        assert abs(deficit(matrix, donor)) < 1e-12, matrix.kind


def test_matrices_are_the_same_in_every_run_and_differ_by_seed():
    one, same, other = (next(matrices(8, 0.5, seed)) for seed in (0, 0, 1))
    assert torch.equal(one.gain, same.gain) and not torch.equal(one.gain, other.gain)


def test_deficit_notices_donors_that_are_not_optimal_or_not_allowed():
    gain = torch.tensor([[0.0, 2, 1], [1, 0, 1], [9, 9, 0]], dtype=torch.float64)
    matrix = Matrix("by hand", gain, torch.tensor([True, True, False]))
    assert deficit(matrix, torch.tensor([1, 0, 2])) == 0
    assert deficit(matrix, torch.tensor([2, 0, 2])) == pytest.approx(1 / 3)
    for donor in ([1, 1, 2], [-1, 0, 2], [3, 0, 2]):
        with pytest.raises(ValueError, match="share a donor, or have none"):
            deficit(matrix, torch.tensor(donor))
    with pytest.raises(ValueError, match="a hard sample has a donor"):
        deficit(matrix, torch.tensor([1, 0, 1]))
