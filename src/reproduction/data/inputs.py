"""Batch processing on the device, in the published order: normalise, mix, erase.

Letters: b batch, c classes, h w image.
"""

from collections.abc import Callable, Sequence

import torch
from timm.data.mixup import Mixup, mixup_target
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from reproduction.config import Augmentation
from reproduction.data.seeding import Purpose, seed_of, seeded

Normalize = Callable[[Tensor], Tensor]  # b 3 h w: uint8 -> float32
InputMixer = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class TrainingInputs:
    """`inputs(images, classes, seed, step, rank)` -> images `b 3 h w` float32, targets `b c`.

    Takes batches of the loader, `b 3 h w` uint8 and `b`, on the device. All random numbers depend
    on seed, step and rank alone.
    """

    def __init__(self, normalize: Normalize, mix: InputMixer, erase: "Erasing | None" = None):
        self.normalize, self.mix, self.erase = normalize, mix, erase

    def __call__(self, images: Tensor, classes: Tensor, *key: int) -> tuple[Tensor, Tensor]:
        images = self.normalize(images)
        with seeded(Purpose.MIX_INPUTS, *key):
            images, targets = self.mix(images, classes)
        return images if self.erase is None else self.erase(images, *key), targets

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

    def __call__(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        mix = {"batch": self._mix_batch, "pair": self._mix_pairs, "elem": self._mix_elem}
        lam = mix[self.mode](x)
        return x, mixup_target(target, self.num_classes, lam, self.label_smoothing)

    def _mix_pairs(self, x: Tensor) -> Tensor:
        """Mixes `b 3 h w` in place and returns the ratio that each image keeps, `b 1`."""
        middle, is_odd = divmod(len(x), 2)
        others = torch.cat([x[:middle], x[middle + is_odd :]])
        lam = self._mix_pair(others)
        x[:middle], x[middle + is_odd :] = others[:middle], others[middle:]
        return torch.cat([lam[:middle], lam.new_ones(is_odd, 1), lam[middle:]])


def build_input_mixer(stack: Augmentation, label_smoothing: float, num_classes: int) -> InputMixer:
    """Returns (images `b 3 h w`, classes `b`) -> (images, soft targets `b c`), in place.

    With both mixup and CutMix a fair coin picks one of them, which is applied with its own `prob`.
    This is drawn per batch, or in other `stack.mode`s per pair or per image.
    """
    if stack.mixup is None and stack.cutmix is None:
        return lambda x, target: (x, mixup_target(target, num_classes, 1.0, label_smoothing))
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
        label_smoothing=label_smoothing,
        num_classes=num_classes,
    )


class Erasing:
    """Random erasing (Zhong et al., 2020) of a normalised batch, with timm's boxes and modes.

    Erases 1 to `count` boxes of an image with probability `prob`. `mode` is the filling: `const`
    zeros, `rand` a colour per image, `pixel` noise per pixel. timm fills box by box with two
    kernels each; here boxes are drawn on the host and filled together.
    """

    def __init__(self, prob: float, mode: str, count: int, device: torch.device | str):
        self.mode, self.device = mode, torch.device(device)
        self.draw_boxes = RandomErasing(prob, mode="const", max_count=count, device="cpu")
        self.generator = torch.Generator(self.device)

    def __call__(self, images: Tensor, *key: int) -> Tensor:
        """Erases in images `b 3 h w` on the device. `key` is seed, step and rank."""
        b, channels, h, w = images.shape
        kept = torch.ones(b, 1, h, w, dtype=torch.bool, pin_memory=self.device.type == "cuda")
        with seeded(Purpose.ERASE_BOXES, *key):
            self.draw_boxes(kept)  # zeros in place
        kept = kept.to(self.device, non_blocking=True)
        if self.mode == "const":
            return torch.where(kept, images, 0.0)
        self.generator.manual_seed(seed_of(Purpose.ERASE_NOISE, *key))
        shape = (b, channels, h, w) if self.mode == "pixel" else (b, channels, 1, 1)
        noise = torch.randn(shape, device=self.device, generator=self.generator)
        return torch.where(kept, images, noise)
