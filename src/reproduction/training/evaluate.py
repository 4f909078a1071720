"""Accuracy and loss of the plain model on held-out images.

Letters: b batch, c classes, k the TOP most probable classes, or all if there are fewer.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduction.config import METRIC, Recipe
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


# Of logits b c and classes b: a sum and a count, over which batches and ranks are summed. Or, if it
# has the attribute `gathers`, of those of all images, on the CPU: a number.
Metric = Callable[[Tensor, Tensor], Any]


def build_metrics(recipe: Recipe) -> dict[str, Metric]:
    """Returns the metrics of one's own by their names."""
    found = {}
    for name, chosen in recipe.metrics.items():
        options = recipe.metrics_options.get(name, {})
        found[name] = METRIC.at(name).made(chosen, options)
    return found


def gathers(metric: Metric) -> bool:
    return getattr(metric, "gathers", False)


class MetricSums:
    """What metrics of one's own have seen on this rank."""

    def __init__(self, metrics: Mapping[str, Metric], world: World):
        self.metrics = metrics
        self.world = world
        batchwise = [name for name in metrics if not gathers(metrics[name])]
        zeros = torch.zeros(2, dtype=torch.float64, device=world.device)
        self.totals = dict.fromkeys(batchwise, zeros)  # sum and count
        self.kept: list[tuple[Tensor, Tensor]] = []

    def add(self, logits: Tensor, targets: Tensor) -> None:
        for name, total in self.totals.items():
            numbers = self.metrics[name](logits, targets)
            self.totals[name] = total + total.new_tensor([float(x) for x in numbers])
        if len(self.totals) < len(self.metrics):
            self.kept.append((logits.cpu(), targets.cpu()))

    def values(self) -> dict[str, float]:
        """Returns each metric over the images of all ranks. PlainError if one is not finite."""
        parts = [part for kept in self.world.gather(self.kept) for part in kept]
        found = {}
        for name, metric in self.metrics.items():
            if gathers(metric):
                logits, targets = map(torch.cat, zip(*parts, strict=True))
                found[name] = float(metric(logits, targets))
            else:
                total, count = self.world.sum(self.totals[name]).tolist()
                found[name] = total / count if count else math.nan
            if not math.isfinite(found[name]):
                raise PlainError(f"recipe.metrics.{name} is {found[name]}")
        return found


@torch.no_grad()
def evaluate(
    model: nn.Module,
    normalize: Normalize,
    loader: Iterable[list[Tensor]],
    world: World,
    precision: str,
    metrics: Mapping[str, Metric],
) -> tuple[dict[str, float], list[Predicted]]:
    """Evaluates on this rank's images and sums over the ranks: every image counts exactly once.

    Returns `top1` and `top5` in percent, `eval_loss`, the mean cross-entropy in nats, and the
    `metrics`; and what is predicted for this rank's images. `loader` yields images `b 3 h w`
    (uint8) and classes `b`. Raises PlainError if the loss is not finite.
    """
    batches = list[Predicted]()
    own = MetricSums(metrics, world)
    totals = torch.zeros(4, dtype=torch.float64, device=world.device)
    with evaluating(model):
        for batch in loader:
            images, targets = [x.to(world.device, non_blocking=True) for x in batch]
            with autocast(world.device, precision):
                logits = model(normalize(images)).float()
            best = logits.topk(min(TOP, logits.shape[1])).indices  # b k
            hits = best == targets[:, None]
            loss = F.cross_entropy(logits, targets, reduction="sum")
            count = loss.new_full((), len(targets))  # on the device, with the other sums
            totals += torch.stack([count, hits[:, 0].sum(), hits.sum(), loss]).double()
            own.add(logits, targets)
            batches.append(Predicted(targets, best, logits.softmax(dim=1).gather(1, best)))
    number, top1, top5, total_loss = world.sum(totals).tolist()
    if not math.isfinite(total_loss):
        raise PlainError(f"the held-out loss is {total_loss}")
    scores = {
        "top1": 100 * top1 / number,
        "top5": 100 * top5 / number,
        "eval_loss": total_loss / number,
        **own.values(),
    }
    return scores, batches
