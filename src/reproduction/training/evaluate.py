"""Accuracy and loss of the plain model on held-out images."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduction.data.inputs import Normalize
from reproduction.system.errors import PlainError
from reproduction.training.distributed import World

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}


class Evaluation(TypedDict):
    """Percentages and nats over all images."""

    top1: float
    top5: float
    eval_loss: float


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Mixed precision as configured; float32 switches it off."""
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "float32")


@torch.no_grad()
def evaluate(
    model: nn.Module,
    normalize: Normalize,
    loader: Iterable[list[Tensor]],
    world: World,
    precision: str,
) -> Evaluation:
    """Evaluates on this rank's images and sums over ranks: every image counts exactly once.

    `loader` gives images `b 3 h w` uint8 and classes `b`.
    """
    was_training = model.training
    model.eval()
    totals = torch.zeros(4, dtype=torch.float64, device=world.device)
    for batch in loader:
        images, targets = (x.to(world.device, non_blocking=True) for x in batch)
        if not len(images):  # all of them are broken, and skipped
            continue
        with autocast(world.device, precision):
            logits = model(normalize(images))
        totals += _count(logits.float(), targets)
    model.train(was_training)
    images_seen, top1, top5, loss = world.sum(totals).tolist()
    if not images_seen:
        raise PlainError("none of the held-out images is readable")
    return {
        "top1": 100 * top1 / images_seen,
        "top5": 100 * top5 / images_seen,
        "eval_loss": loss / images_seen,
    }


def _count(logits: Tensor, targets: Tensor) -> Tensor:
    """Images, right at first, right among five, summed cross-entropy: `4`."""
    ranked = logits.topk(min(5, logits.shape[1])).indices == targets[:, None]
    loss = F.cross_entropy(logits, targets, reduction="sum")
    counts = [targets.new_tensor(len(targets)), ranked[:, 0].sum(), ranked.sum(), loss]
    return torch.stack([count.double() for count in counts])
