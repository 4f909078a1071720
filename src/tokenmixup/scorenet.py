"""ScoreNet and the difficulty of samples (Section 3.1).

Letters: b batch, n tokens with prefix, t spatial tokens, d width, c classes.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from tokenmixup.contexts import without_autocast
from tokenmixup.settings import Difficulty

Pooling = Literal["attention", "average", "class_token"]


def sequence_pool(tokens: Tensor, score: nn.Linear) -> Tensor:
    """Averages tokens with learned weights: Softmax(score(X))^T X (Hassani et al., 2021).

    `b t d` -> `b d`; `score` maps d to 1.
    """
    share = score(tokens).softmax(dim=1)  # b t 1
    return (share.mT @ tokens).squeeze(1)


class ScoreNet(nn.Module):
    """A linear classifier on the pooled input tokens of a block, in its parameters' precision.

    `pooling`: sequence pooling of the spatial tokens (`attention`), their mean (`average`), or
    token 0 (`class_token`). With `stop_gradient`, its loss trains ScoreNet alone.
    """

    def __init__(
        self,
        embed_dim: int,
        num_classes: int,
        pooling: Pooling = "attention",
        stop_gradient: bool = False,
    ):
        super().__init__()
        self.pooling = pooling
        self.stop_gradient = stop_gradient
        self.pool: nn.Linear | None = None
        if pooling == "attention":
            self.pool = nn.Linear(embed_dim, 1)
        self.head = nn.Linear(embed_dim, num_classes)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.trunc_normal_(parameter, std=0.02)
            else:
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, num_prefix_tokens: int = 0) -> Tensor:
        """`b n d` -> logits `b c`. Raises ValueError if the class token is missing."""
        if self.pooling == "class_token" and num_prefix_tokens < 1:
            raise ValueError("pooling='class_token' needs a class token, these tokens have none")
        if self.stop_gradient:
            tokens = tokens.detach()
        with without_autocast(tokens.device.type):
            tokens = tokens.to(self.head.weight.dtype)
            return self.head(self._pooled(tokens, num_prefix_tokens))

    def _pooled(self, tokens: Tensor, num_prefix_tokens: int) -> Tensor:
        """`b n d` -> `b d`."""
        if self.pooling == "class_token":
            return tokens[:, 0]
        if num_prefix_tokens:
            tokens = tokens[:, num_prefix_tokens:]  # b t d
        if self.pool is None:
            return tokens.mean(dim=1)
        return sequence_pool(tokens, self.pool)


def difficulty(score_logits: Tensor, targets: Tensor, rule: Difficulty = "paper") -> Tensor:
    """Cross-entropy of each sample in nats, float32, Eq. 1 (`eq:difficulty`).

    `score_logits`: `b c`; `targets`: `b c`, probabilities. `rule=excess`, ours, subtracts their
    entropy, the lowest cross-entropy that a model can reach: KL(targets || scores) is left. Returns
    `b`.
    """
    with without_autocast(score_logits.device.type):
        soft = targets.float()
        nats = (score_logits.float().log_softmax(dim=1) * -soft).sum(dim=1)
        if rule == "excess":  # adds sum p log p, minus the entropy; the bound is for rounding
            nats = (nats + torch.xlogy(soft, soft).sum(dim=1)).clamp(min=0)
        return nats
