"""Image transforms, all of them timm's."""

from collections.abc import Callable, Sequence

from PIL import Image
from timm.data import create_transform
from torch import Tensor

Transform = Callable[[Image.Image], Tensor]


def training_transform(
    *,
    image_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    scale: Sequence[float],
    ratio: Sequence[float],
    interpolation: str,
    hflip: float,
    color_jitter: float,
    auto_augment: str | None,
    erasing_prob: float,
    erasing_mode: str,
    erasing_count: int,
) -> Transform:
    """PIL image -> `3 s s`, augmented and normalised. timm skips jitter beside auto-augment."""
    return create_transform(
        (3, image_size, image_size),
        is_training=True,
        scale=(scale[0], scale[1]),
        ratio=(ratio[0], ratio[1]),
        interpolation=interpolation,
        hflip=hflip,
        color_jitter=color_jitter,
        auto_augment=auto_augment,
        re_prob=erasing_prob,
        re_mode=erasing_mode,
        re_count=erasing_count,
        mean=tuple(mean),
        std=tuple(std),
    )


def evaluation_transform(
    *, image_size: int, mean: Sequence[float], std: Sequence[float], crop_pct: float
) -> Transform:
    """PIL image -> `3 s s`: resized so that the centre crop is `crop_pct` of the shorter side."""
    return create_transform(
        (3, image_size, image_size),
        is_training=False,
        interpolation="bicubic",
        crop_pct=crop_pct,
        mean=tuple(mean),
        std=tuple(std),
    )
