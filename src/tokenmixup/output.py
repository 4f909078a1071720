"""What a training forward pass returns, and the loss on it. Letters: b batch, c classes."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Output(NamedTuple):
    """What a training forward pass returns.

    `stats` are scalars: `mixed_samples`, the easy ones; `mixed_tokens`, replaced ones in each of
    these on average; with HTM `difficulty`, the mean in nats.
    """

    logits: Tensor  # b c
    targets: Tensor  # b c, after mixing
    score_logits: Tensor | None  # b c, of ScoreNet; None without HTM
    score_loss: Tensor | None  # scalar, against the targets that enter HTM's block; or None
    stats: dict[str, Tensor]


def training_loss(output: Output, score_loss_weight: float) -> Tensor:
    """CE(logits, mixed targets) + lambda x ScoreNet's loss (Section 3.1), float32."""
    loss = F.cross_entropy(output.logits.float(), output.targets.float())
    return loss if output.score_loss is None else loss + score_loss_weight * output.score_loss
