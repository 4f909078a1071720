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
from reproduction.data.workers import Batch
from reproduction.errors import PlainError
from reproduction.training.ranks import World
from tokenmixup.contexts import evaluating

TOP = 5
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}


class Predicted(NamedTuple):
    """What is predicted for a batch."""

    places: list[int]  # b, of the images in their half
    best: Tensor  # b k, the most probable class first
    probabilities: Tensor  # b k, of the best


class Scores(NamedTuple):
    """How good the predictions for a half are."""

    top1: float  # percent
    top5: float
    loss: float  # the mean cross-entropy in nats
    own: dict[str, float]  # metrics of one's own

    @property
    def held_out(self) -> dict[str, float]:
        """The entries of a line, if the images are those held out."""
        return {"top1": self.top1, "top5": self.top5, "eval_loss": self.loss, **self.own}

    @property
    def validation(self) -> dict[str, float]:
        """The entries of a line, if the images are those for validation."""
        named = {"top1": self.top1, "top5": self.top5, "loss": self.loss, **self.own}
        return {f"val_{name}": value for name, value in named.items()}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Mixed precision as configured; float32 disables it."""
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "float32")


# Of the logits b c and classes b of all images, on the CPU: a number.
Metric = Callable[[Tensor, Tensor], Any]


def build_metrics(recipe: Recipe) -> dict[str, Metric]:
    """Returns the metrics of one's own by their names."""
    found = {}
    for name, chosen in recipe.metrics.items():
        options = recipe.metrics_options.get(name, {})
        found[name] = METRIC.at(name).made(chosen, options)
    return found


class Scorer:
    """Scores what this rank predicts, then sums over the ranks: every image counts once."""

    def __init__(self, metrics: Mapping[str, Metric], world: World):
        self.metrics = metrics
        self.world = world
        self.totals = torch.zeros(4, dtype=torch.float64, device=world.device)
        self.kept: list[tuple[Tensor, Tensor]] = []  # logits and classes, for the metrics

    def add(self, logits: Tensor, targets: Tensor, best: Tensor) -> None:
        """Adds a batch: logits `b c`, classes `b` and the best ones `b k`."""
        hits = best == targets[:, None]
        loss = F.cross_entropy(logits, targets, reduction="sum")
        count = loss.new_full((), len(targets))  # on the device, with the other sums
        self.totals += torch.stack([count, hits[:, 0].sum(), hits.sum(), loss]).double()
        if self.metrics:
            self.kept.append((logits.cpu(), targets.cpu()))

    def scores(self) -> Scores:
        """Raises PlainError if one is not finite."""
        number, top1, top5, loss = self.world.sum(self.totals).tolist()
        if not math.isfinite(loss):
            raise PlainError(f"the held-out loss is {loss}")
        return Scores(
            top1=100 * top1 / number,
            top5=100 * top5 / number,
            loss=loss / number,
            own=self._own_values(),
        )

    def _own_values(self) -> dict[str, float]:
        if not self.metrics:
            return {}
        kept = [batch for of_rank in self.world.gather(self.kept) for batch in of_rank]
        logits = torch.cat([of_batch for of_batch, _ in kept])
        targets = torch.cat([of_batch for _, of_batch in kept])
        found = {name: float(metric(logits, targets)) for name, metric in self.metrics.items()}
        for name, value in found.items():
            if not math.isfinite(value):
                raise PlainError(f"recipe.metrics.{name} is {value}")
        return found


@torch.no_grad()
def predict(
    model: nn.Module,
    normalize: Normalize,
    loader: Iterable[Batch],
    world: World,
    precision: str,
    scorer: Scorer | None = None,
) -> list[Predicted]:
    """Returns what is predicted for this rank's images; a scorer gets it with their classes."""
    batches = list[Predicted]()
    with evaluating(model):
        for batch in loader:
            images = batch.images.to(world.device, non_blocking=True)
            with autocast(world.device, precision):
                logits = model(normalize(images)).float()
            best = logits.topk(min(TOP, logits.shape[1])).indices  # b k
            if scorer is not None:
                scorer.add(logits, batch.classes.to(world.device, non_blocking=True), best)
            probabilities = logits.softmax(dim=1).gather(1, best)
            batches.append(Predicted(batch.places, best, probabilities))
    return batches
