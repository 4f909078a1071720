"""Manifold mixup (Verma et al., 2019): a linear mix of hidden states, for Table 5's combinations.

Letters: b batch, n tokens with prefix, d width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ManifoldMixup:
    """Settings of manifold mixup.

    `alpha`: of the Beta(alpha, alpha) distribution of the kept share. `layers`: the blocks, counted
    from 0, one of which is drawn for every batch; its input is mixed.
    """

    alpha: float = 2.0
    layers: Sequence[int] = (0, 1, 2)

    def __post_init__(self) -> None:
        if not isinstance(self.alpha, int | float) or not 0 < self.alpha < math.inf:
            raise ValueError(f"manifold_mixup.alpha={self.alpha}: must be > 0 and finite")
        whole = isinstance(self.layers, Sequence) and all(
            type(layer) is int and layer >= 0 for layer in self.layers
        )
        if not whole or not self.layers or len(set(self.layers)) < len(self.layers):
            raise ValueError(
                f"manifold_mixup.layers={self.layers}: must be different blocks' indices"
            )


class ManifoldMix(NamedTuple):
    """What is drawn for one batch."""

    layer: int
    keep_ratio: float
    partner: Tensor  # b int64

    def __call__(self, x: Tensor) -> Tensor:
        """Mixes tokens `b n d` or targets `b c` with those of the partners."""
        return self.keep_ratio * x + (1 - self.keep_ratio) * x[self.partner]


def draw_manifold_mix(settings: ManifoldMixup, batch: Tensor) -> ManifoldMix:
    """Draws layer, kept share and partners for a batch `b ...` from the host's generator."""
    layer = settings.layers[int(torch.randint(len(settings.layers), ()))]
    keep_ratio = float(torch.distributions.Beta(settings.alpha, settings.alpha).sample())
    return ManifoldMix(
        layer, keep_ratio, torch.randperm(len(batch)).to(batch.device, non_blocking=True)
    )
