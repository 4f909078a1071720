"""Manifold mixup (Verma et al., 2019): a linear mix of hidden states, for Table 5's combinations.

Letters: b batch, n tokens with prefix, d width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tokenmixup.settings import ManifoldMixup


class ManifoldMix(NamedTuple):
    """The random draws for one batch."""

    layer: int
    keep_ratio: Tensor  # scalar
    partner: Tensor  # b int64

    def __call__(self, x: Tensor) -> Tensor:
        """Mixes tokens `b n d`, or targets `b c`, with those of the partners."""
        return self.keep_ratio * x + (1 - self.keep_ratio) * x[self.partner]


def draw_manifold_mix(settings: ManifoldMixup, batch: Tensor) -> ManifoldMix:
    """Draws layer, kept share and partners for a batch `b ...` from the host's generator."""
    layer = settings.layers[int(torch.randint(len(settings.layers), (), device="cpu"))]
    alpha = torch.tensor(settings.alpha, dtype=torch.float32, device="cpu")
    keep_ratio = torch.distributions.Beta(alpha, alpha).sample()
    partner = torch.randperm(len(batch), device="cpu")
    return ManifoldMix(
        layer=layer,
        keep_ratio=keep_ratio.to(batch.device, non_blocking=True),
        partner=partner.to(batch.device, non_blocking=True),
    )
