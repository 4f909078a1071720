"""The output of a training forward pass and its loss.

Letters: b batch, t spatial tokens, c classes, k layers of HTM.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class LayerMix(NamedTuple):
    """Results of HTM at one layer."""

    layer: int
    score_logits: Tensor  # b c, of the layer's ScoreNet
    difficulty: Tensor  # b, with the targets before mixing
    is_easy: Tensor  # b bool
    mask: Tensor  # b t bool, the replaced tokens
    gain: Tensor  # b t, gain in saliency of each replaced token, else 0
    saliency: Tensor  # b t, what was compared, before mixing
    donor: Tensor  # b int64, a hard sample's is itself
    keep_ratio: Tensor  # b 1, weight of a sample's own label


class Stat(NamedTuple):
    """A figure of a batch: `total / divisor`, 0 for 0 / 0; `total` alone without one.

    Both add up over micro-batches and ranks; of `is_max`, the largest counts.
    """

    total: Tensor | float
    divisor: Tensor | float | None = None
    is_max: bool = False


class Output(NamedTuple):
    """Output of a training forward pass. Without HTM all but the first two have their defaults.

    Rows are in the order of the images. With `order=published`, `logits` and `targets` are in the
    published code's order, easy samples first.
    """

    logits: Tensor  # b c
    targets: Tensor  # b c, after mixing
    score_loss: Tensor | None = None  # scalar: the mean difficulty, summed over the layers
    is_easy: Tensor | None = None  # b bool, at any layer
    mask: Tensor | None = None  # b t bool, tokens replaced at any layer
    gain: Tensor | None = None  # b t, their gain in saliency, summed over the layers
    layers: tuple[LayerMix, ...] = ()
    score_loss_weight: float = 0.0  # the setting of HTM

    @property
    def sums(self) -> dict[str, Stat]:
        """What `stats` are made of, which adds up over micro-batches and ranks."""
        if self.is_easy is None or self.mask is None or self.gain is None:
            return {"mixed_samples": Stat(0), "mixed_tokens": Stat(0, 0)}
        first, *others = (mix.difficulty.detach() for mix in self.layers)
        difficulty = torch.cat([first, *others]) if others else first
        sums = _sums(self.is_easy, self.mask, self.gain, difficulty)
        for mix in self.layers if len(self.layers) > 1 else ():
            of_layer = _sums(mix.is_easy, mix.mask, mix.gain, mix.difficulty.detach())
            sums |= {f"{name}/{mix.layer}": stat for name, stat in of_layer.items()}
        return sums

    @property
    def stats(self) -> dict[str, Tensor]:
        """Scalars, computed on access.

        `mixed_samples`: number of easy samples; `mixed_tokens`: replaced tokens per easy sample;
        with HTM also `difficulty`: mean in nats; `gain_max`, `gain_mean`: gain in saliency of the
        replaced tokens. With several layers these are over all of them together; the values of each
        layer follow under names such as `mixed_samples/1`.
        """
        if not self.layers:
            zero = self.logits.new_zeros((), dtype=torch.float32)
            return dict.fromkeys(self.sums, zero)
        return {name: _value(stat) for name, stat in self.sums.items()}


def _sums(is_easy: Tensor, mask: Tensor, gain: Tensor, difficulty: Tensor) -> dict[str, Stat]:
    mixed, replaced = (x.sum(dtype=torch.float32) for x in (is_easy, mask))
    return {
        "mixed_samples": Stat(mixed),
        "mixed_tokens": Stat(replaced, mixed),
        "difficulty": Stat(difficulty.sum(), difficulty.numel()),
        "gain_max": Stat(gain.amax(), is_max=True),
        "gain_mean": Stat(gain.sum(), replaced),
    }


def _value(stat: Stat) -> Any:
    total, divisor, _ = stat
    if divisor is None:
        return total
    return total / (divisor.clamp(min=1) if isinstance(divisor, Tensor) else divisor)


def training_loss(output: Output, score_loss_weight: float | None = None) -> Tensor:
    """Returns cross-entropy(logits, mixed targets) + lambda x ScoreNet's loss, at least in float32.

    `score_loss_weight`: lambda, by default `HTM.score_loss_weight`, whose default is the published
    code's. The paper trains both jointly (Section 3.1) without giving lambda.
    """
    if not isinstance(output, Output):
        raise TypeError(
            f"training_loss needs the Output of a training pass, got a {type(output).__name__}: "
            "call module.train() first, or F.cross_entropy for logits"
        )
    weight = output.score_loss_weight if score_loss_weight is None else score_loss_weight
    dtype = torch.promote_types(output.logits.dtype, torch.float32)
    loss = F.cross_entropy(output.logits.to(dtype), output.targets.to(dtype))
    if output.score_loss is None:
        return loss
    return loss.add(output.score_loss, alpha=weight)
