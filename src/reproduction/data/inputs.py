"""Batch processing on the device, in the published order: normalise, mix, erase.

Letters: b batch, c classes, h w image.
"""

from collections.abc import Callable, Iterator, Sequence
from math import exp, log, sqrt
from random import Random
from typing import NamedTuple

import torch
from timm.data.mixup import Mixup, cutmix_bbox_and_lam, one_hot
from torch import Tensor

from reproduction.config import Augmentation
from reproduction.data.seeding import Purpose, seed_of, seeded

Normalize = Callable[[Tensor], Tensor]  # b 3 h w: uint8 -> float32
Box = tuple[int, int, int, int]  # rows from, to; columns from, to
# Of timm's random erasing: a box's share of the image, its height over its width, tries to fit it
AREAS, LOG_RATIOS, ATTEMPTS = (0.02, 1 / 3), (log(0.3), log(1 / 0.3)), 10


class Mixed(NamedTuple):
    """Images, each mixed with a partner or with none, and what labels are formed of."""

    images: Tensor  # b 3 h w
    classes: Tensor  # b, of the image itself
    partners: Tensor  # b, of the image that is mixed in
    weight: Tensor | float = 1.0  # of the image itself, one for all or b 1
    box: Box | None = None  # of the partner's pixels, with CutMix of the whole batch

    def split(self, count: int) -> Iterator["Mixed"]:
        """Yields `count` consecutive parts, whose sizes differ by at most one."""
        weights: Sequence[Tensor | float] = [self.weight] * count
        if isinstance(self.weight, Tensor):
            weights = self.weight.tensor_split(count)
        parts = (x.tensor_split(count) for x in (self.images, self.classes, self.partners))
        for images, classes, partners, weight in zip(*parts, weights, strict=True):
            yield Mixed(images, classes, partners, weight, self.box)

    def targets(self, num_classes: int, smoothing: float) -> Tensor:
        """Returns soft targets `b c`: both classes by the weight, with smoothed labels."""
        off = smoothing / num_classes
        own, others = (
            one_hot(classes, num_classes, on_value=1 - smoothing + off, off_value=off)
            for classes in (self.classes, self.partners)
        )
        return own * self.weight + others * (1.0 - self.weight)


InputMixer = Callable[[Tensor, Tensor], Mixed]


class TrainingInputs:
    """`inputs(images, classes, seed, step, rank)` -> `Mixed`, with images float32.

    Takes batches of the loader, `b 3 h w` uint8 and `b`, on the device. All random numbers depend
    on seed, step and rank alone.
    """

    def __init__(self, normalize: Normalize, mix: InputMixer, erase: "Erasing | None" = None):
        self.normalize, self.mix, self.erase = normalize, mix, erase

    def __call__(self, images: Tensor, classes: Tensor, *key: int) -> Mixed:
        images = self.normalize(images)
        with seeded(Purpose.MIX_INPUTS, *key):
            mixed = self.mix(images, classes)
        return mixed if self.erase is None else mixed._replace(images=self.erase(images, *key))

    def stop_mixing(self) -> None:
        """Stops mixing; labels are still smoothed."""
        if isinstance(self.mix, Mixup):
            self.mix.mixup_enabled = False


def build_normalize(
    mean: Sequence[float], std: Sequence[float], device: torch.device | str
) -> Normalize:
    """Returns (x / 255 - mean) / std by channel, in two passes over the batch."""
    shift, scale = (255 * torch.tensor(x, device=device)[:, None, None] for x in (mean, std))
    return lambda images: (images - shift).div_(scale)


class AnyMixup(Mixup):
    """timm's Mixup of a batch with its reverse, for any batch size.

    timm asserts an even batch size; here the middle image of an odd batch is mixed with itself.
    """

    def __call__(self, x: Tensor, target: Tensor) -> Mixed:
        self.box: Box | None = None
        mix = {"batch": self._mix_batch, "pair": self._mix_pairs, "elem": self._mix_elem}
        weight = mix[self.mode](x)
        return Mixed(x, target, target.flip(0), weight, self.box)

    def _mix_batch(self, x: Tensor) -> float:
        """Mixes `b 3 h w` in place and returns the ratio that all images keep.

        As timm's, which does not tell the box.
        """
        weight, is_cutmix = self._params_per_batch()
        if weight == 1.0:
            return weight
        others = x.flip(0)
        if not is_cutmix:
            x.mul_(weight).add_(others.mul_(1.0 - weight))
            return weight
        (top, bottom, left, right), weight = cutmix_bbox_and_lam(
            x.shape, weight, ratio_minmax=self.cutmix_minmax, correct_lam=self.correct_lam
        )
        self.box = int(top), int(bottom), int(left), int(right)
        x[:, :, top:bottom, left:right] = others[:, :, top:bottom, left:right]
        return weight

    def _mix_pairs(self, x: Tensor) -> Tensor:
        """Mixes `b 3 h w` in place and returns the ratio that each image keeps, `b 1`."""
        middle, is_odd = divmod(len(x), 2)
        others = torch.cat([x[:middle], x[middle + is_odd :]])
        lam = self._mix_pair(others)
        x[:middle], x[middle + is_odd :] = others[:middle], others[middle:]
        return torch.cat([lam[:middle], lam.new_ones(is_odd, 1), lam[middle:]])


def build_input_mixer(stack: Augmentation) -> InputMixer:
    """Returns (images `b 3 h w`, classes `b`) -> `Mixed`, whose images are changed in place.

    With both mixup and CutMix a fair coin picks one of them, which is applied with its own `prob`.
    This is drawn per batch, or in other `stack.mode`s per pair or per image.
    """
    if stack.mixup is None and stack.cutmix is None:
        return lambda x, target: Mixed(x, target, target)
    (mixup_alpha, mixup_prob), (cutmix_alpha, cutmix_prob) = (
        (0.0, 0.0) if mix is None else (mix.alpha, mix.prob) for mix in (stack.mixup, stack.cutmix)
    )
    both = stack.mixup is not None and stack.cutmix is not None
    total = mixup_prob + cutmix_prob
    return AnyMixup(
        mixup_alpha=mixup_alpha,
        cutmix_alpha=cutmix_alpha,
        prob=total / 2 if both else total,
        switch_prob=cutmix_prob / total if total else 0.0,
        mode=stack.mode,
    )


class Erasing:
    """Random erasing (Zhong et al., 2020) of a normalised batch, with timm's boxes and modes.

    Erases 1 to `count` boxes of an image with probability `prob`. `mode` is the filling: `const`
    zeros, `rand` a colour per image, `pixel` noise per pixel. timm fills box by box with two
    kernels each; here boxes are drawn on the host and filled together.
    """

    def __init__(self, prob: float, mode: str, count: int, device: torch.device | str):
        self.prob, self.mode, self.count = prob, mode, count
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device)

    def __call__(self, images: Tensor, *key: int) -> Tensor:
        """Erases in images `b 3 h w` on the device. `key` is seed, step and rank."""
        b, channels, h, w = images.shape
        kept = torch.ones(b, 1, h, w, dtype=torch.bool, pin_memory=self.device.type == "cuda")
        rng = Random(seed_of(Purpose.ERASE_BOXES, *key))
        for pixels in kept.numpy()[:, 0]:
            for rows, columns in self._boxes(rng, h, w):
                pixels[rows, columns] = False
        kept = kept.to(self.device, non_blocking=True)
        if self.mode == "const":
            return torch.where(kept, images, 0.0)
        self.generator.manual_seed(seed_of(Purpose.ERASE_NOISE, *key))
        shape = (b, channels, h, w) if self.mode == "pixel" else (b, channels, 1, 1)
        noise = torch.randn(shape, device=self.device, generator=self.generator)
        return torch.where(kept, images, noise)

    def _boxes(self, rng: Random, h: int, w: int) -> Iterator[tuple[slice, slice]]:
        """Draws the boxes of an image with the same numbers as timm: rows and columns."""
        if rng.random() > self.prob:
            return
        count = 1 if self.count == 1 else rng.randint(1, self.count)
        for _ in range(count):
            for _ in range(ATTEMPTS):
                area, ratio = rng.uniform(*AREAS) * (h * w) / count, exp(rng.uniform(*LOG_RATIOS))
                rows, columns = round(sqrt(area * ratio)), round(sqrt(area / ratio))
                if rows < h and columns < w:
                    top, left = rng.randint(0, h - rows), rng.randint(0, w - columns)
                    yield slice(top, top + rows), slice(left, left + columns)
                    break
