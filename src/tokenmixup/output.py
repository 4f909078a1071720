"""The output of a training forward pass and its loss.

Letters: b batch, t spatial tokens, c classes, k layers of HTM.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmixup.horizontal import HorizontalMix


class Stat(NamedTuple):
    """A figure of a batch: `total / divisor` (0 for 0 / 0), or `total` if there is no divisor.

    Over micro-batches and ranks both are summed; with `is_max` the largest total is taken.
    """

    total: Tensor | float
    divisor: Tensor | float | None = None
    is_max: bool = False


UNMIXED = {  # without HTM
    "easy_samples": Stat(0),
    "mixed_samples": Stat(0),
    "mixed_tokens": Stat(0, 0),
}


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
    layers: tuple[HorizontalMix, ...] = ()
    score_loss_weight: float = 0.0  # the setting of HTM
    sums: Mapping[str, Stat] = UNMIXED  # what `stats` are computed from

    @property
    def stats(self) -> dict[str, Tensor]:
        """Scalars, computed on access.

        `easy_samples`: how many have a difficulty below tau; `mixed_samples`: how many of them have
        a replaced token; `mixed_tokens`: replaced tokens per mixed sample; with HTM also
        `difficulty`: mean in nats; `gain_max`, `gain_mean`: gain in saliency of the replaced
        tokens. With several layers these are over all of them together; the values of each layer
        follow under names such as `mixed_samples/1`.
        """
        if not self.layers:
            zero = self.logits.new_zeros((), dtype=torch.float32)
            return dict.fromkeys(self.sums, zero)
        return {name: _value(stat) for name, stat in self.sums.items()}


def output_of(
    logits: Tensor, targets: Tensor, layers: Sequence[HorizontalMix], score_loss_weight: float
) -> Output:
    """Returns the output of a pass, with its sums: computed here, they are compiled with it."""
    if not layers:
        return Output(logits, targets)
    is_easy = reduce(torch.logical_or, [mix.is_easy for mix in layers])
    mask = reduce(torch.logical_or, [mix.mask for mix in layers])
    gain = reduce(torch.add, [mix.gain for mix in layers])
    difficulty = [mix.difficulty for mix in layers]
    sums = _sums(is_easy, mask, gain, difficulty)
    if len(layers) > 1:
        for mix in layers:
            of_layer = _sums(mix.is_easy, mix.mask, mix.gain, [mix.difficulty])
            sums |= {f"{name}/{mix.layer}": stat for name, stat in of_layer.items()}
    return Output(
        logits=logits,
        targets=targets,
        score_loss=reduce(torch.add, [nats.mean() for nats in difficulty]),
        is_easy=is_easy,
        mask=mask,
        gain=gain,
        layers=tuple(layers),
        score_loss_weight=score_loss_weight,
        sums=sums,
    )


def _sums(is_easy: Tensor, mask: Tensor, gain: Tensor, difficulty: list[Tensor]) -> dict[str, Stat]:
    mixed = mask.any(dim=1).sum(dtype=torch.float32)
    replaced = mask.sum(dtype=torch.float32)
    nats = difficulty[0] if len(difficulty) == 1 else torch.cat(difficulty)
    return {
        "easy_samples": Stat(is_easy.sum(dtype=torch.float32)),
        "mixed_samples": Stat(mixed),
        "mixed_tokens": Stat(replaced, mixed),
        "difficulty": Stat(nats.detach().sum(), nats.numel()),
        "gain_max": Stat(gain.amax(), is_max=True),
        "gain_mean": Stat(gain.sum(), replaced),
    }


def _value(stat: Stat) -> Any:
    if stat.divisor is None:
        return stat.total
    if isinstance(stat.divisor, Tensor):
        return stat.total / stat.divisor.clamp(min=1)
    return stat.total / stat.divisor


def training_loss(output: Output, score_loss_weight: float | None = None) -> Tensor:
    """Returns cross-entropy(logits, mixed targets) + lambda x ScoreNet's loss, float32 or wider.

    `score_loss_weight`: lambda, by default `HTM.score_loss_weight`, whose default is the published
    code's. The paper trains both jointly (Section 3.1) without giving lambda. Returns a scalar.
    """
    wide = torch.promote_types(output.logits.dtype, torch.float32)
    loss = F.cross_entropy(output.logits.to(wide), output.targets.to(wide))
    if output.score_loss is None:
        return loss
    if score_loss_weight is None:
        score_loss_weight = output.score_loss_weight
    return loss.add(output.score_loss, alpha=score_loss_weight)
