"""Accuracy and loss of the plain model on held-out images.

Letters: b batch, c classes, k the TOP most probable classes, or all if there are fewer.
"""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduction.data.inputs import Normalize
from reproduction.errors import PlainError
from reproduction.training.ranks import World
from tokenmixup.contexts import evaluating

TOP = 5
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}


class Predicted(NamedTuple):
    """What is predicted for a batch."""

    targets: Tensor  # b
    best: Tensor  # b k, the most probable class first
    probabilities: Tensor  # b k, of the best


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Mixed precision as configured; float32 disables it."""
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "float32")


@torch.no_grad()
def evaluate(
    model: nn.Module,
    normalize: Normalize,
    loader: Iterable[list[Tensor]],
    world: World,
    precision: str,
) -> tuple[dict[str, float], list[Predicted]]:
    """Evaluates on this rank's images and sums over the ranks: every image counts exactly once.

    Returns `top1` and `top5` in percent and `eval_loss`, the mean cross-entropy in nats, and what
    is predicted for this rank's images. `loader` yields images `b 3 h w` (uint8) and classes `b`.
    Raises PlainError if the loss is not finite.
    """
    batches = list[Predicted]()
    totals = torch.zeros(4, dtype=torch.float64, device=world.device)
    with evaluating(model):
        for batch in loader:
            images, targets = [x.to(world.device, non_blocking=True) for x in batch]
            with autocast(world.device, precision):
                logits = model(normalize(images)).float()
            best = logits.topk(min(TOP, logits.shape[1])).indices  # b k
            hits = best == targets[:, None]
            loss = F.cross_entropy(logits, targets, reduction="sum")
            count = loss.new_full((), len(targets))
            # summed on the device: nothing waits for it
            totals += torch.stack([count, hits[:, 0].sum(), hits.sum(), loss]).double()
            batches.append(Predicted(targets, best, logits.softmax(dim=1).gather(1, best)))
    number, top1, top5, total_loss = world.sum(totals).tolist()
    if not math.isfinite(total_loss):
        raise PlainError(f"the held-out loss is {total_loss}")
    scores = {
        "top1": 100 * top1 / number,
        "top5": 100 * top5 / number,
        "eval_loss": total_loss / number,
    }
    return scores, batches
