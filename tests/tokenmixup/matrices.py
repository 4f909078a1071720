"""Gain matrices for tests, and how far an assignment is from the optimum of one.

saliencies.npz holds the saliency of 504 images in float16: of two ViTs with 64 tokens trained on
scikit-learn's digits, one with a class token, early and late in training.

Letters: b batch, t tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from tokenmixup.assignment import gain_matrix

TOKENS = 64
SALIENCIES = Path(__file__).parents[1] / "fixtures" / "saliencies.npz"


class Matrix(NamedTuple):
    """Gains `b b` in float64, receiver x donor, and the easy samples, `b` bool."""

    name: str
    gain: Tensor
    is_easy: Tensor


def matrices(b: int, share: float, seed: int = 0) -> Iterator[Matrix]:
    """Yields one matrix of each sort for `b` samples, up to 504, with this share of easy ones."""
    g = torch.Generator().manual_seed(1000 * b + int(100 * share) + 7 * seed)
    easy = round(share * b)

    def matrix(name: str, gain: Tensor) -> Matrix:
        chosen = torch.randperm(b, generator=g)[:easy]
        is_easy = torch.zeros(b, dtype=torch.bool)
        is_easy[chosen] = True
        return Matrix(name, gain.double(), is_easy)

    def of_saliency(name: str, saliency: Tensor, rho: float = 0.0) -> Matrix:
        return matrix(name, gain_matrix(saliency, rho))

    for name, recorded in np.load(SALIENCIES).items():
        order = torch.randperm(len(recorded), generator=g)
        some = torch.from_numpy(recorded)[order[:b]]
        rho = 0.0005
        if "late" in name:
            rho = 0.005
        yield of_saliency(f"trained, {name}", some.float(), rho)
    for sharpness in (0.1, 1.0, 3.0):
        yield of_saliency(f"pooled, {sharpness}", _pooled(b, sharpness, g))
        yield of_saliency(f"class token, {sharpness}", _of_token(b, sharpness, g))
    some = _of_token(b, 1.0, g)
    yield of_saliency("mostly zeros", some, rho=0.05)
    yield of_saliency("identical", some[:1].repeat(b, 1))
    eight = torch.arange(b) % 8 % len(some)
    yield of_saliency("eight different", some[eight])
    noise = torch.randn(b, TOKENS, generator=g)
    yield of_saliency("nearly uniform", 1 / TOKENS + 1e-7 * noise)
    uniform = torch.rand(b, b, generator=g, dtype=torch.float64)
    yield matrix("uniform", uniform)
    yield matrix("ties", torch.randint(4, (b, b), generator=g))
    numbers = torch.arange(1, b + 1)
    yield matrix("products", torch.outer(numbers, numbers))
    yield matrix("zeros", torch.zeros(b, b))
    yield matrix("huge", 1e300 * uniform)
    yield matrix("tiny", 1e-200 * uniform)


def _of_token(b: int, sharpness: float, g: torch.Generator) -> Tensor:
    """The attention of one query in two heads, `b t`."""
    scores = sharpness * torch.randn(2, b, TOKENS, generator=g)
    return scores.softmax(dim=2).mean(dim=0)


def _pooled(b: int, sharpness: float, g: torch.Generator) -> Tensor:
    """The mean attention of all queries, `b t`."""
    q, k = torch.randn(2, b, TOKENS, 16, generator=g)
    scores = sharpness * q @ k.mT / 4
    return scores.softmax(dim=2).mean(dim=1)


def deficit(matrix: Matrix, donor: Tensor) -> float:
    """Returns how far the total gain is below the largest, relative to it; 0 if that is 0.

    `donor`: `b` on the host, valid by `check_donors`.
    """
    gain = matrix.gain[matrix.is_easy].numpy()
    rows, best = linear_sum_assignment(gain, maximize=True)
    optimum = float(gain[rows, best].sum())
    chosen = donor[matrix.is_easy].numpy()
    total = float(gain[rows, chosen].sum())
    if optimum > 0:
        return (optimum - total) / optimum
    return 0.0


def check_donors(is_easy: Tensor, donor: Tensor) -> None:
    """Raises ValueError unless each easy sample has another donor and each hard one itself."""
    own = torch.arange(len(donor))
    if not torch.equal(donor[~is_easy], own[~is_easy]):
        raise ValueError("a hard sample has a donor")
    chosen = donor[is_easy]
    exists = (chosen >= 0) & (chosen < len(donor))
    if not exists.all() or len(chosen.unique()) < len(chosen):
        raise ValueError("easy samples share a donor, or have none")


def loss_of(matrix: Matrix, module: ModuleType, device: str) -> float:
    """Returns the deficit of a kernel's donors."""
    found = module.device_donors(matrix.gain.to(device), matrix.is_easy.to(device))
    donor = found.cpu()
    check_donors(matrix.is_easy, donor)
    return deficit(matrix, donor)
