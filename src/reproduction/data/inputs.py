"""Batch processing on the device, in the published order: normalise, mix, erase.

Letters: b batch, c classes, h w image.
"""

from collections.abc import Callable, Iterator, Sequence
from math import exp, log, sqrt
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from timm.data.mixup import Mixup, cutmix_bbox_and_lam, one_hot
from torch import Tensor
from torch.utils._pytree import tree_map_only

from reproduction.config import MIXING, Augmentation, Config, OwnMix
from reproduction.data.seeding import Purpose, seed_of, seeded

Normalize = Callable[[Tensor], Tensor]  # b 3 h w: uint8 -> float32
# Of timm's random erasing
AREAS = (0.02, 1 / 3)  # a box's share of the image
LOG_RATIOS = (log(0.3), log(1 / 0.3))  # its height over its width
ATTEMPTS = 10  # to draw a box that fits


class MixingDraws(NamedTuple):
    """What is drawn for mixup or CutMix of a batch."""

    ratios: Tensor  # 4 1 1: weights of own and partner's pixels, then of labels
    swapped: Tensor | None  # 1 1 h w bool, pixels taken from the partner, with CutMix
    is_mixed: Tensor  # b bool, images that are mixed with another one


class Draws(NamedTuple):
    """What the host draws for a batch, or its copy on the device. None: of what is off."""

    mixing: Any = None  # MixingDraws or, for an input mixing of one's own, numpy's generator
    kept: Tensor | None = None  # b 1 h w bool, pixels that are not erased

    def to(self, device: torch.device) -> "Draws":
        return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True), self)


class Mixed(NamedTuple):
    """Images, each mixed with a partner or with none, and what labels are formed of."""

    images: Tensor  # b 3 h w
    classes: Tensor  # b, of the image itself
    partners: Tensor  # b, of the image that is mixed in
    weight: Tensor | float = 1.0  # of the images themselves, b 1
    rest: Tensor | float = 0.0  # of the partners: 1 - weight
    is_mixed: Tensor | None = None  # b bool, None: no image is
    swapped: Tensor | None = None  # b 1 h w bool, pixels of the partner, with CutMix

    def split(self, count: int) -> Iterator["Mixed"]:
        """Yields `count` consecutive parts, whose sizes differ by at most one."""
        columns = [x.tensor_split(count) if isinstance(x, Tensor) else [x] * count for x in self]
        for parts in zip(*columns, strict=True):
            yield Mixed(*parts)

    def targets(self, num_classes: int, smoothing: float) -> Tensor:
        """Returns soft targets `b c`: both classes by their weights, with smoothed labels."""
        off = smoothing / num_classes
        on = 1 - smoothing + off
        own = one_hot(self.classes, num_classes, on_value=on, off_value=off)
        others = one_hot(self.partners, num_classes, on_value=on, off_value=off)
        return own * self.weight + others * self.rest


def build_normalize(
    mean: Sequence[float], std: Sequence[float], device: torch.device | str
) -> Normalize:
    """Returns (x / 255 - mean) / std by channel, in two passes over the batch."""
    shift = 255 * torch.tensor(mean, device=device)[:, None, None]
    scale = 255 * torch.tensor(std, device=device)[:, None, None]
    return lambda images: (images - shift).div_(scale)


class InputMixing(Mixup):
    """timm's Mixup, which mixes a batch with its reverse: mixup and CutMix by the same operations.

    timm has other operations for each, and asserts an even batch size; here the middle image of an
    odd batch is mixed with itself.
    """

    def draw(self, shape: torch.Size) -> MixingDraws:
        """Returns the draws for images `b 3 h w`, from numpy's global generator, as timm's."""
        b, _, h, w = shape
        lam, is_cutmix = self._params_per_batch()
        pixel_weight = lam  # of the image's own pixels
        label_weight = lam  # of its own class
        swapped = np.zeros((1, 1, h, w), dtype=bool)
        if is_cutmix and lam != 1:
            box, label_weight = cutmix_bbox_and_lam(
                shape, lam, ratio_minmax=self.cutmix_minmax, correct_lam=self.correct_lam
            )
            top, bottom, left, right = map(int, box)
            swapped[..., top:bottom, left:right] = True
            pixel_weight = 1.0  # CutMix swaps whole pixels
        weights = [pixel_weight, 1 - pixel_weight, label_weight, 1 - label_weight]
        ratios = np.array(weights, np.float32)
        is_mixed = np.full(b, label_weight < 1)
        if b % 2 == 1:
            is_mixed[b // 2] = False
        return MixingDraws(
            ratios=for_device(ratios[:, None, None]),
            swapped=for_device(swapped) if self.cutmix_alpha > 0 else None,
            is_mixed=for_device(is_mixed),
        )

    def mix(self, images: Tensor, classes: Tensor, draws: MixingDraws) -> Mixed:
        pixel_weight, pixel_rest, weight, rest = draws.ratios  # 1 1 each
        partners = images.flip(0)
        if self.mixup_alpha > 0:
            images = images * pixel_weight[..., None, None]
            images = images + partners * pixel_rest[..., None, None]
        swapped = draws.swapped
        if swapped is not None:
            images = torch.where(swapped, partners, images)
            swapped = swapped.expand(len(images), -1, -1, -1)
        return Mixed(
            images=images,
            classes=classes,
            partners=classes.flip(0),
            weight=weight.expand(len(images), 1),
            rest=rest.expand(len(images), 1),
            is_mixed=draws.is_mixed,
            swapped=swapped,
        )


# Of normalised images b 3 h w, their classes b and a generator of the host, seeded by seed, step
# and rank: the mixed images, the partners' places b, and the weights b of the own classes.
Mix = Callable[[Tensor, Tensor, np.random.Generator], tuple[Tensor, Tensor, Tensor]]


class OwnMixing:
    """An input mixing of one's own."""

    def __init__(self, name: str, settings: OwnMix):
        self.mix_images: Mix = MIXING.at(name).made(settings.source, settings.options)

    def draw(self, shape: torch.Size) -> np.random.Generator:
        """Returns a generator, seeded from numpy's global one."""
        return np.random.default_rng(np.random.randint(2**31))

    def mix(self, images: Tensor, classes: Tensor, rng: np.random.Generator) -> Mixed:
        """Mixes a batch; ValueError, on a CPU, for weights beyond 0 and 1."""
        mixed, partners, weight = self.mix_images(images, classes, rng)
        if weight.device.type == "cpu" and not ((weight >= 0) & (weight <= 1)).all():
            raise ValueError(f"returns weights {weight.tolist()}, must be from 0 to 1")
        weight = weight.to(images)
        return Mixed(
            images=mixed.to(images),  # a mask of numpy is float64
            classes=classes,
            partners=classes[partners],
            weight=weight[:, None],
            rest=1 - weight[:, None],
            is_mixed=weight < 1,
        )


def for_device(values: np.ndarray) -> Tensor:
    """Returns values in memory that a GPU, if one is used, reads while the host goes on."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if torch.cuda.is_initialized():
        return tensor.pin_memory()
    return tensor


def build_input_mixing(stack: Augmentation) -> InputMixing | OwnMixing | None:
    """Returns what mixes a batch, if the stack has input mixup, CutMix or one of one's own.

    With the first two, a fair coin picks one of them for a batch, which is applied with its own
    `prob`.
    """
    for name, settings in stack.own.items():
        return OwnMixing(name, settings)
    mixings = (stack.mixup, stack.cutmix)
    probs = [0.0 if each is None else each.prob for each in mixings]
    mixup_alpha, cutmix_alpha = [0.0 if each is None else each.alpha for each in mixings]
    number = len(mixings) - mixings.count(None)
    if number == 0:
        return None
    return InputMixing(
        mixup_alpha=mixup_alpha,
        cutmix_alpha=cutmix_alpha,
        prob=sum(probs) / number,
        switch_prob=probs[1] / (sum(probs) or 1),  # to CutMix
    )


class Erasing:
    """Random erasing (Zhong et al., 2020) of a normalised batch, with timm's boxes and modes.

    Erases a box of an image with probability `prob`. `mode` is the filling: `const` zeros, `rand` a
    colour per image, `pixel` noise per pixel. The boxes of a batch are filled together.
    """

    def __init__(self, prob: float, mode: str, device: torch.device | str):
        self.prob = prob
        self.mode = mode
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device)

    def draw(self, shape: torch.Size, *key: int) -> Tensor:
        """Returns the pixels to keep, `b 1 h w` bool, and seeds the noise."""
        b, _, h, w = shape
        kept = np.ones((b, 1, h, w), dtype=bool)
        rng = Random(seed_of(Purpose.ERASE_BOXES, *key))
        for kept_of_image in kept[:, 0]:
            if rng.random() <= self.prob:
                kept_of_image[_box(rng, h, w)] = False
        self.generator.manual_seed(seed_of(Purpose.ERASE_NOISE, *key))
        return for_device(kept)

    def fill(self, images: Tensor, kept: Tensor) -> Tensor:
        """Fills the pixels of images `b 3 h w` that are not kept, on the device."""
        if self.mode == "const":
            return torch.where(kept, images, 0.0)
        b, channels, h, w = images.shape
        if self.mode == "rand":
            h = w = 1
        shape = (b, channels, h, w)
        noise = torch.randn(shape, device=self.device, generator=self.generator)
        return torch.where(kept, images, noise)


def _box(rng: Random, h: int, w: int) -> tuple[slice, slice]:
    """Draws a box of an image with the numbers of timm: rows and columns, empty if none fits."""
    for _ in range(ATTEMPTS):
        area = rng.uniform(*AREAS) * (h * w)
        ratio = exp(rng.uniform(*LOG_RATIOS))
        rows = round(sqrt(area * ratio))
        columns = round(sqrt(area / ratio))
        if rows < h and columns < w:
            top = rng.randint(0, h - rows)
            left = rng.randint(0, w - columns)
            return slice(top, top + rows), slice(left, left + columns)
    return slice(0), slice(0)


class TrainingInputs:
    """Makes `Mixed`, with images float32, of batches of the loader, `b 3 h w` uint8 and `b`.

    `draw` draws all random numbers by seed, step and rank on the host, `apply` does the rest on the
    device, always by the same operations; `inputs(images, classes, seed, step, rank)` does both.
    """

    def __init__(
        self,
        normalize: Normalize,
        mixing: InputMixing | OwnMixing | None,
        erase: Erasing | None,
    ):
        self.normalize = normalize
        self.mixing = mixing
        self.erase = erase

    def __call__(self, images: Tensor, classes: Tensor, *key: int) -> Mixed:
        draws = self.draw(images.shape, *key)
        return self.apply(images, classes, draws.to(images.device))

    def draw(self, shape: torch.Size, *key: int) -> Draws:
        """Returns the draws for images of a shape, `b 3 h w`. `key` is seed, step and rank."""
        draws = Draws()
        if self.mixing is not None:
            with seeded(Purpose.MIX_INPUTS, *key):
                draws = Draws(self.mixing.draw(shape))
        if self.erase is not None:
            draws = draws._replace(kept=self.erase.draw(shape, *key))
        return draws

    def apply(self, images: Tensor, classes: Tensor, draws: Draws) -> Mixed:
        images = self.normalize(images)
        mixed = Mixed(images, classes, classes)
        if self.mixing is not None:
            mixed = self.mixing.mix(images, classes, draws.mixing)
        if self.erase is not None and draws.kept is not None:
            mixed = mixed._replace(images=self.erase.fill(mixed.images, draws.kept))
        return mixed

    def stop_mixing(self) -> None:
        """Stops mixing; labels are still smoothed."""
        self.mixing = None

    @property
    def generators(self) -> list[torch.Generator]:
        """Those on the device that `apply` draws from."""
        if self.erase is None:
            return []
        return [self.erase.generator]


def build_training_inputs(config: Config, device: torch.device) -> TrainingInputs:
    """Returns normalisation, input mixup, CutMix and random erasing of recipe and stack."""
    normalize = build_normalize(config.dataset.mean, config.dataset.std, device)
    mixing = build_input_mixing(config.augmentation)
    transforms = config.recipe.transforms
    erase = None
    if transforms.erasing_prob > 0:
        erase = Erasing(transforms.erasing_prob, transforms.erasing_mode, device)
    return TrainingInputs(normalize, mixing, erase)
