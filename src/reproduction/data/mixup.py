"""Input mixup and CutMix with timm's semantics, and soft targets without them."""

from collections.abc import Callable

from timm.data.mixup import Mixup, mixup_target
from torch import Tensor

from reproduction.data.seeding import Purpose, seeded

InputMixer = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class BatchMixup(Mixup):
    """timm's Mixup in its batch mode (one lambda, the batch against its reverse), any batch size.

    timm asserts an even batch in every mode; here the middle of an odd one meets itself.
    """

    def __call__(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        lam = self._mix_batch(x)
        return x, mixup_target(target, self.num_classes, lam, self.label_smoothing)


def build_input_mixer(
    *,
    num_classes: int,
    label_smoothing: float,
    mixup: tuple[float, float] | None,
    cutmix: tuple[float, float] | None,
) -> InputMixer:
    """(images `b 3 h w`, classes `b`) -> (images, soft targets `b c`); images change in place.

    `mixup`, `cutmix`: (alpha, probability) or None. With both, a coin picks one of them for each
    batch, which then happens with its own probability.
    """
    if mixup is None and cutmix is None:
        return lambda x, target: (x, mixup_target(target, num_classes, 1.0, label_smoothing))
    mixup_alpha, mixup_prob = mixup or (0.0, 0.0)
    cutmix_alpha, cutmix_prob = cutmix or (0.0, 0.0)
    both = mixup is not None and cutmix is not None
    total = mixup_prob + cutmix_prob
    return BatchMixup(
        mixup_alpha=mixup_alpha,
        cutmix_alpha=cutmix_alpha,
        prob=total / 2 if both else total,
        switch_prob=cutmix_prob / total if total else 0.0,
        mode="batch",
        label_smoothing=label_smoothing,
        num_classes=num_classes,
    )


def mix_inputs(
    mixer: InputMixer, images: Tensor, targets: Tensor, *key: int
) -> tuple[Tensor, Tensor]:
    """Applies `mixer` with the randomness that belongs to `key`: seed, step and rank."""
    with seeded(Purpose.MIX_INPUTS, *key):
        return mixer(images, targets)
