"""Where the regimes of Figure 4 begin: few mixed samples, an abrupt rise, convergence. Pure.

The rule, on the mean of mixed samples in each epoch (a curve of e epochs):

(A) few samples are mixed at first. It ends where the curve has gone a fifth of the way from its
    first value to its final level, the mean of the last tenth, for good. There is such a rise only
    if the first value is less than half of the final level, and an abrupt one only if the curve has
    gone two fifths of the way, for good, within a twentieth of all epochs.
(B) goes on from there, with slow growth.
(C) begins where the curve has settled: from there on its running mean over a twentieth of all
    epochs stays within 5 % of the final level. It is convergence if that holds for the last
    quarter of training at least, and not from the first epoch on.

A curve of fewer than 20 epochs has neither boundary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from reproduction.reporting.curves import running_mean

LEAST_EPOCHS = 20


class Regimes(NamedTuple):
    """Index of the first epoch of (B) and of (C); None where the curve does not show it."""

    rise: int | None
    convergence: int | None


def find_regimes(mixed_samples: Sequence[float]) -> Regimes:
    """By the rule above, from one value for each epoch."""
    curve = np.asarray(mixed_samples, dtype=float)
    if len(curve) < LEAST_EPOCHS:
        return Regimes(None, None)
    level = float(curve[-(len(curve) // 10) :].mean())
    return Regimes(_rise(curve, level), _convergence(curve, level))


def _rise(curve: np.ndarray, level: float) -> int | None:
    first = float(curve[0])
    if first >= level / 2:
        return None
    begun, gone = (_for_good(curve >= first + way * (level - first)) for way in (0.2, 0.4))
    if begun is None or gone is None or gone - begun > len(curve) // 20:
        return None
    return begun


def _convergence(curve: np.ndarray, level: float) -> int | None:
    smooth = running_mean(curve.tolist(), len(curve) // 20)
    settled = _for_good(abs(smooth - level) <= 0.05 * level)
    if not settled or len(curve) - settled < len(curve) / 4:
        return None
    return settled


def _for_good(holds: np.ndarray) -> int | None:
    """The index from which on it holds to the end."""
    if not holds[-1]:
        return None
    broken = np.flatnonzero(~holds)
    return int(broken[-1]) + 1 if len(broken) else 0
