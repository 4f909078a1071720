"""Checks a training batch. Letters: b batch, c classes, h w image."""

from typing import Any

import torch
from torch import Tensor

ROUNDING = 0.01  # of the sum of 1,000 smoothed probabilities in bfloat16


def check_batch(images: Any, targets: Any, num_classes: int) -> Tensor:
    """Returns the targets. Raises ValueError unless `b 3 h w` and probabilities `b c`.

    Raises TypeError without targets. Their values are looked at on a CPU only.
    """
    if targets is None:
        raise TypeError("training needs module(images, targets) with targets b c")
    if not isinstance(images, Tensor) or images.ndim != 4:
        raise ValueError("TokenMixup mixes images of one size, as a tensor b 3 h w")
    shape = (len(images), num_classes)
    found = targets.shape if isinstance(targets, Tensor) else type(targets)
    if found != shape or not len(images):
        raise ValueError(
            f"targets {found}: must be probabilities b c of at least one image, here {shape}, "
            "such as F.one_hot(classes, c)"
        )
    if targets.device.type != "cpu":  # looking would wait for it
        return targets
    close = (targets.sum(dim=1, dtype=torch.float32) - 1).abs() < ROUNDING  # false for nan
    if not (good := close & (targets >= 0).all(dim=1)).all():
        row = int(good.int().argmin())
        raise ValueError(
            f"targets[{row}]: must be probabilities, which are >= 0 and sum to 1; it sums to "
            f"{float(targets[row].sum()):g}, its lowest value is {float(targets[row].min()):g}"
        )
    return targets
