"""Gain matrices of several kinds, and how far an assignment is from the optimum of one.

saliencies.npz holds the saliency of 504 images in float16: of two ViTs with 64 tokens trained on
scikit-learn's digits, one with a class token, early and late in training.

Letters: b batch, t tokens.
"""

from collections.abc import Iterator
from pathlib import Path
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

    kind: str
    gain: Tensor
    is_easy: Tensor


def matrices(b: int, share: float, seed: int = 0) -> Iterator[Matrix]:
    """Yields a matrix of each kind for `b` samples, up to 504, with this share of easy ones."""
    g = torch.Generator().manual_seed(1000 * b + int(100 * share) + 7 * seed)
    easy = round(share * b)

    def matrix(kind: str, gain: Tensor) -> Matrix:
        is_easy = torch.zeros(b, dtype=torch.bool)
        is_easy[torch.randperm(b, generator=g)[:easy]] = True
        return Matrix(kind, gain.double(), is_easy)

    for name, saliency in np.load(SALIENCIES).items():
        some = torch.from_numpy(saliency)[torch.randperm(len(saliency), generator=g)[:b]].float()
        yield matrix(f"trained, {name}", gain_matrix(some, 0.005 if "late" in name else 0.0005))
    for sharpness in (0.1, 1.0, 3.0):
        yield matrix(f"pooled, {sharpness}", gain_matrix(_pooled(b, sharpness, g), 0))
        yield matrix(f"class token, {sharpness}", gain_matrix(_of_token(b, sharpness, g), 0))
    some = _of_token(b, 1.0, g)
    yield matrix("mostly zeros", gain_matrix(some, 0.05))
    yield matrix("identical", gain_matrix(some[:1].repeat(b, 1), 0))
    yield matrix("eight different", gain_matrix(some[torch.arange(b) % 8 % len(some)], 0))
    noise = 1e-7 * torch.randn(b, TOKENS, generator=g)
    yield matrix("nearly uniform", gain_matrix(1 / TOKENS + noise, 0))
    uniform = torch.rand(b, b, generator=g, dtype=torch.float64)
    yield matrix("uniform", uniform)
    yield matrix("ties", torch.randint(4, (b, b), generator=g))
    yield matrix("products", torch.outer(torch.arange(1, b + 1), torch.arange(1, b + 1)))
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
    return (sharpness * q @ k.mT / 4).softmax(dim=2).mean(dim=1)


def deficit(matrix: Matrix, donor: Tensor) -> float:
    """Returns how far the total gain is below the largest, relative to it; 0 if that is 0.

    `donor` is `b`, on any device. Raises ValueError unless each easy sample has another donor and
    each hard one itself.
    """
    rows = matrix.is_easy.nonzero().flatten()
    chosen = donor.cpu()
    hard = ~matrix.is_easy
    if not torch.equal(chosen[hard], torch.arange(len(donor))[hard]):
        raise ValueError("a hard sample has a donor")
    easy = chosen[rows]
    if not ((easy >= 0) & (easy < len(donor))).all() or len(easy.unique()) < len(easy):
        raise ValueError("easy samples share a donor, or have none")
    gain = matrix.gain[rows].numpy()
    receivers, best = linear_sum_assignment(gain, maximize=True)
    optimum = float(gain[receivers, best].sum())
    total = float(gain[np.arange(len(rows)), easy.numpy()].sum())
    return (optimum - total) / optimum if optimum > 0 else 0.0
