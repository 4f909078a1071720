"""The output of a training forward pass and its loss.

Letters: b batch, t spatial tokens, c classes.
"""

from typing import NamedTuple

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
    def stats(self) -> dict[str, Tensor]:
        """Scalars, computed on access.

        `mixed_samples`: number of easy samples; `mixed_tokens`: replaced tokens per easy sample;
        with HTM also `difficulty`: mean in nats; `gain_max`, `gain_mean`: gain in saliency of the
        replaced tokens. With several layers these are over all of them together; the values of each
        layer follow under names such as `mixed_samples/1`.
        """
        if self.is_easy is None or self.mask is None or self.gain is None:
            zero = self.logits.new_zeros((), dtype=torch.float32)
            return {"mixed_samples": zero, "mixed_tokens": zero}
        difficulty = torch.stack([mix.difficulty.detach() for mix in self.layers])
        stats = _stats(self.is_easy, self.mask, self.gain, difficulty)
        for mix in self.layers if len(self.layers) > 1 else ():
            of_layer = _stats(mix.is_easy, mix.mask, mix.gain, mix.difficulty.detach())
            stats |= {f"{name}/{mix.layer}": value for name, value in of_layer.items()}
        return stats


def _stats(is_easy: Tensor, mask: Tensor, gain: Tensor, difficulty: Tensor) -> dict[str, Tensor]:
    mixed_samples, replaced = (x.sum(dtype=torch.float32) for x in (is_easy, mask))
    return {
        "mixed_samples": mixed_samples,
        "mixed_tokens": replaced / mixed_samples.clamp(min=1),
        "difficulty": difficulty.mean(),
        "gain_max": gain.amax(),
        "gain_mean": gain.sum() / replaced.clamp(min=1),
    }


def training_loss(output: Output, score_loss_weight: float | None = None) -> Tensor:
    """Returns cross-entropy(logits, mixed targets) + lambda x ScoreNet's loss, at least in float32.

    `score_loss_weight`: lambda, by default `HTM.score_loss_weight`, whose default is the published
    code's. The paper trains both jointly (Section 3.1) without giving lambda.
    """
    weight = output.score_loss_weight if score_loss_weight is None else score_loss_weight
    dtype = torch.promote_types(output.logits.dtype, torch.float32)
    loss = F.cross_entropy(output.logits.to(dtype), output.targets.to(dtype))
    if output.score_loss is None:
        return loss
    return loss.add(output.score_loss, alpha=weight)
