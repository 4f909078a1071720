"""The metrics of a run: those of every batch, collected on the device, and those of its epochs.

A line is one of metrics.jsonl: of a batch, or of an epoch that was evaluated, with the results.
"""

import math
import time
from datetime import timedelta
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reproduction.training.evaluate import Scores
from reproduction.training.ranks import World
from tokenmixup.output import Stat

Line = dict[str, Any]

MEDIAN_EPOCHS = 10


class Measured(NamedTuple):
    """What is known of a batch on this rank."""

    head: Line  # the first columns
    images: int  # of all ranks
    values: Tensor  # micro-batch x name x total and divisor, on the device


class BatchMetrics:
    """Collects the figures of batches on the device; `fetch` turns them into lines.

    It knows no names: they are the keys of what it is given, the same ones from fetch to fetch.
    """

    def __init__(self, world: World):
        self.world = world
        self.batches: list[Measured] = []
        self.stats: dict[str, Stat] = {}  # of the last micro-batch: names, divisors
        self.restart_clock()

    def restart_clock(self) -> None:
        """Keeps other work than training out of the throughput."""
        self.start = time.perf_counter()

    def add(self, head: Line, images: int, micro_batches: list[dict[str, Stat]]) -> None:
        """Collects a batch without waiting for the device; all have equally many micro-batches.

        `head` begins the line, `images` counts those of all ranks.
        """
        self.stats = micro_batches[-1]
        values = []
        for stats in micro_batches:
            for stat in stats.values():
                values += [self._on_device(stat.total), self._on_device(stat.divisor)]
        shape = len(micro_batches), len(self.stats), 2
        self.batches.append(Measured(head, images, torch.stack(values).view(shape)))

    def _on_device(self, value: Tensor | float | None) -> Tensor:
        if isinstance(value, Tensor):
            return value
        return constant(float(value or 0), self.world.device)  # None: of a total without divisor

    def fetch(self) -> tuple[list[Line], float]:
        """Returns a line for each collected batch, over all ranks, and the seconds of all."""
        if not self.batches:
            return [], 0.0
        batches, self.batches = self.batches, []
        # batch x micro-batch x name x total and divisor
        table = torch.stack([batch.values for batch in batches]).double()
        sums = self.world.sum(table.sum(dim=1))
        maxima = self.world.max(table.amax(dim=1))
        fetched = torch.cat([sums, maxima[..., :1]], dim=-1).tolist()  # waits for the device
        seconds = time.perf_counter() - self.start
        images = sum(batch.images for batch in batches)
        speed = {"images_per_second": round(images / seconds, 1)}
        self.restart_clock()
        lines = list[Line]()
        for batch, row in zip(batches, fetched, strict=True):
            lines.append({**batch.head, **self._values(row), **speed})
        return lines, seconds

    def _values(self, row: list[list[float]]) -> Line:
        values: Line = {}
        for (name, stat), (total, divisor, largest) in zip(self.stats.items(), row, strict=True):
            if stat.is_max:
                values[name] = largest
            elif stat.divisor is None:
                values[name] = int(total)  # a count
            else:
                values[name] = total / divisor if divisor else 0.0
        return values


@cache
def constant(value: float, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A number on the device, which is kept, since to make one launches a kernel."""
    return torch.full((), value, dtype=dtype, device=device)


def not_finite(line: Line, uses_scaler: bool) -> str:
    """Returns why the line of a step ends the run, or "": a figure of it is not finite.

    For float16's scaler a norm that is not finite is normal: it skips the update.
    """
    if not math.isfinite(line.get("gain_max", 0.0)):  # a GPU raises no exception for it
        return "the saliency gain is not finite"
    if not math.isfinite(line["loss"]):
        return f"the loss is {line['loss']}"
    if not math.isfinite(line["gradient_norm"]) and not uses_scaler:
        return f"the norm of the gradient is {line['gradient_norm']}"
    return ""


class Sums(NamedTuple):
    """Over the batches of an epoch."""

    batches: float = 0.0
    loss: float = 0.0
    easy_samples: float = 0.0
    tokens: float = 0.0  # replaced
    mixed_samples: float = 0.0

    def plus(self, line: Line) -> "Sums":
        """Returns the sums with one more batch: one by one, as a resumed run adds them too."""
        mixed = line["mixed_samples"]
        return Sums(
            batches=self.batches + 1,
            loss=self.loss + line["loss"],
            easy_samples=self.easy_samples + line["easy_samples"],
            tokens=self.tokens + mixed * line["mixed_tokens"],
            mixed_samples=self.mixed_samples + mixed,
        )

    @property
    def tokens_each(self) -> float | None:
        """Replaced tokens per mixed sample, if there is one."""
        return self.tokens / self.mixed_samples if self.mixed_samples else None


def accuracy(line: Line) -> float:
    """That of an evaluated epoch, on the validation split if there is one."""
    name = "val_top1" if "val_top1" in line else "top1"
    return float(line[name])


def best(log: list[Line]) -> Line:
    """The line of the first epoch with the highest accuracy."""
    return max(log, key=accuracy)


class Pace:
    """The time that is left, by the seconds of a step since an epoch began."""

    def __init__(self, first: int, total: int):
        self.first = first
        self.total = total
        self.began = time.monotonic()

    def left(self, step: int) -> float:
        """Seconds from a completed step to the last one."""
        seconds = (time.monotonic() - self.began) / max(step - self.first, 1)
        return seconds * (self.total - step)


def describe(
    sums: Sums,
    log: list[Line],
    *,
    images: int,
    number: int,
    total: int,
    has_htm: bool,
    seconds_left: float,
) -> str:
    """Returns the line of epoch `number`, which has trained on `images`."""
    loss = sums.loss / max(sums.batches, 1)
    parts = [f"epoch {number:{len(str(total))}}/{total}", f"loss {loss:.3f}"]
    if has_htm:
        parts.append(_describe_mixing(sums, images))
    if log and log[-1]["epoch"] == number:
        name = "validation" if "val_top1" in log[-1] else "top-1"
        parts.append(f"{name} {accuracy(log[-1]):.2f} %")
    if number < total:
        parts.append(f"{timedelta(seconds=round(seconds_left))} left")
    return "  ".join(parts)


def _describe_mixing(sums: Sums, images: int) -> str:
    """What HTM has done in an epoch, such as `easy 20 %, mixed 3 %, 1.2 tokens each`."""
    easy, mixed = (100 * x / images for x in (sums.easy_samples, sums.mixed_samples))
    text = f"easy {easy:.3g} %, mixed {mixed:.3g} %"
    if sums.tokens_each is not None:
        text += f", {sums.tokens_each:.3g} tokens each"
    return text


def mixing(epochs: list[Sums], images: int) -> dict[str, float | None]:
    """The means of the last epoch, and the shares of all images that were easy, and mixed.

    `epochs`: complete ones; `images`: in all of them. None stands for what is not known.
    """
    last = epochs[-1] if epochs else Sums()
    batches = max(last.batches, 1)
    easy = math.fsum(sums.easy_samples for sums in epochs)
    mixed = math.fsum(sums.mixed_samples for sums in epochs)
    found: dict[str, float | None] = {
        "easy_samples": last.easy_samples / batches,
        "mixed_samples": last.mixed_samples / batches,
        "mixed_tokens": last.tokens_each,
        "easy_share": round(easy / max(images, 1), 4),
        "mixed_share": round(mixed / max(images, 1), 4),
    }
    return found if epochs else dict.fromkeys(found)


def unmixed_reason(epochs: list[Sums]) -> str:
    """Returns why HTM has replaced no token in any of these epochs, or "" if it has."""
    if any(sums.mixed_samples for sums in epochs):
        return ""
    if any(sums.easy_samples for sums in epochs):
        return "no gain was above rho"
    return "no sample was easy, with a difficulty below tau"


def tested_accuracies(log: list[Line], last: Scores, selected: Scores) -> dict[str, Any]:
    """Returns the accuracies of a run with a validation split for summary.json.

    `last` and `selected` are the results on the test set, of the last epoch and of the best by
    validation; accuracies over all epochs are null.
    """
    best_line = best(log)
    return {
        "top1_last": last.top1,
        "top5_last": last.top5,
        "top1_selected": selected.top1,
        "top5_selected": selected.top5,
        "selected_epoch": best_line["epoch"],
        "val_top1_last": log[-1]["val_top1"],
        "val_top1_selected": best_line["val_top1"],
        "top1_best": None,
        "top1_median10": None,
        "top5_best": None,
    }


def accuracies(log: list[Line]) -> dict[str, Any]:
    """Returns the accuracies of a run for summary.json, whose epochs are evaluated on the tests."""
    last = log[-1]
    late = [line["top1"] for line in log if line["epoch"] > last["epoch"] - MEDIAN_EPOCHS]
    return {
        "top1_last": last["top1"],
        "top1_best": best(log)["top1"],
        "top1_median10": median(late),
        "top5_last": last["top5"],
        "top5_best": max(line["top5"] for line in log),
    }
