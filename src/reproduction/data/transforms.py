"""Image transforms, all of them timm's. What follows on the device stands in inputs.py."""

from collections.abc import Callable, Sequence

from PIL import Image
from timm.data import create_transform
from torch import Tensor

Transform = Callable[[Image.Image], Tensor]


def training_transform(
    *,
    image_size: int,
    scale: Sequence[float],
    ratio: Sequence[float],
    interpolation: str,
    hflip: float,
    color_jitter: float,
    auto_augment: str | None,
    mean: Sequence[float],
) -> Transform:
    """PIL image -> `3 s s` uint8, augmented. timm skips jitter beside auto-augment.

    `mean` is the colour of what auto-augment moves into the image.
    """
    return create_transform(
        (3, image_size, image_size),
        is_training=True,
        scale=(scale[0], scale[1]),
        ratio=(ratio[0], ratio[1]),
        interpolation=interpolation,
        hflip=hflip,
        color_jitter=color_jitter,
        auto_augment=auto_augment,
        mean=tuple(mean),
        normalize=False,
    )


def evaluation_transform(*, image_size: int, crop_pct: float) -> Transform:
    """PIL image -> `3 s s` uint8: the centre crop is `crop_pct` of the shorter side."""
    return create_transform(
        (3, image_size, image_size),
        is_training=False,
        interpolation="bicubic",
        crop_pct=crop_pct,
        normalize=False,
    )
