"""The metrics of a run: those of every batch, collected on the device, and those of its epochs.

A line is one of metrics.jsonl: of a batch, or of an epoch that was evaluated, with the results.
"""

import math
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor

from reproduction.system import PlainError
from reproduction.training.ranks import World
from reproduction.training.stop import ADVICE
from tokenmixup.output import Stat

Line = dict[str, Any]
Sums = list[float]  # over the batches of an epoch: their number, loss, mixed samples, mixed tokens

MEDIAN_EPOCHS = 10


class BatchMetrics:
    """Collects the scalars of batches on the device; `fetch` turns them into metrics.jsonl's lines.

    It knows no names: they are the keys of what it is given.
    """

    def __init__(self, world: World):
        self.world = world
        # of each batch: its first columns; images; micro-batch x name x total and divisor
        self.batches: list[tuple[Line, int, Tensor]] = []
        self.stats: dict[str, Stat] = {}  # of the last micro-batch
        self.restart_clock()

    def restart_clock(self) -> None:
        """Keeps other work than training out of the throughput."""
        self.start = time.perf_counter()

    def add(self, head: Line, images: int, micro_batches: list[dict[str, Stat]]) -> None:
        """Collects a batch without waiting for the device; all have equally many micro-batches.

        `head` begins the line, `images` counts those of all ranks.
        """
        self.stats = micro_batches[-1]
        values = [
            value if isinstance(value, Tensor) else _constant(float(value or 0), self.world.device)
            for stats in micro_batches
            for total, divisor, _ in stats.values()
            for value in (total, divisor)
        ]
        shape = len(micro_batches), len(self.stats), 2
        self.batches.append((head, images, torch.stack(values).view(shape)))

    def fetch(self) -> tuple[list[Line], float]:
        """Returns a line for each collected batch, over all ranks, and the seconds of all."""
        if not self.batches:
            return [], 0.0
        heads, images, rows = zip(*self.batches, strict=True)
        table = torch.stack(rows).double()  # batch, micro-batch, name, total and divisor
        sums = self.world.sum(table.sum(dim=1))
        maxima = self.world.max(table.amax(dim=1))
        fetched = torch.cat([sums, maxima[..., :1]], dim=-1).tolist()  # waits for the device
        seconds = time.perf_counter() - self.start
        speed = {"images_per_second": round(sum(images) / seconds, 1)}
        self.batches = []
        self.restart_clock()
        lines = list[Line]()
        for head, row in zip(heads, fetched, strict=True):
            lines.append({**head, **self._values(row), **speed})
        return lines, seconds

    def _values(self, row: list[list[float]]) -> Line:
        values: Line = {}
        for (name, stat), (total, divisor, largest) in zip(self.stats.items(), row, strict=True):
            value = largest if stat.is_max else total
            if stat.divisor is None:
                values[name] = int(value) if value.is_integer() else value
            else:
                values[name] = value / divisor if divisor else 0.0
        return values


@cache
def _constant(value: float, device: torch.device) -> Tensor:
    """A number on the device, as to launch it costs more than to look it up."""
    return torch.full((), value, device=device)


def checked(lines: list[Line], scales: bool) -> Iterator[Line]:
    """Yields lines until an update ends the run, of which PlainError tells the step.

    A line has `skipped` = 1 if its loss or a gradient is not finite. If float16's scaler `scales`,
    it has skipped the update, and the run goes on, as long as the loss is finite.
    """
    for line in lines:
        reason = ""
        if math.isnan(line.get("gain_max", 0.0)):  # a GPU raises no exception for it
            reason = "the saliency gain is not finite: the model has diverged"
        elif not math.isfinite(line["loss"]):
            reason = f"the loss is {line['loss']}"
        elif line["skipped"] and not scales:
            reason = "the gradient is not finite"
        if reason:
            raise PlainError(f"step {line['step']}: {reason}; {ADVICE}")
        yield line


def added(sums: Sums, line: Line) -> Sums:
    """Returns the sums with a batch, one by one, so that they do not depend on a resume."""
    mixed = line["mixed_samples"]
    batch = 1, line["loss"], mixed, mixed * line["mixed_tokens"]
    return [x + y for x, y in zip(sums, batch, strict=True)]


def means(sums: Sums) -> tuple[float, float, float]:
    """The mean loss and number of mixed samples of a batch, and of mixed tokens in each of them."""
    batches, loss, mixed, tokens = sums
    return loss / max(batches, 1), mixed / max(batches, 1), tokens / max(mixed, 1)


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
        self.first, self.total, self.began = first, total, time.monotonic()

    def left(self, step: int) -> float:
        """Seconds from a completed step to the last one."""
        seconds = (time.monotonic() - self.began) / max(step - self.first, 1)
        return seconds * (self.total - step)


def describe_step(line: Line, pace: Pace) -> str:
    """Returns what is known of a step, for a line of its own."""
    step = line["step"]
    parts = [f"step {step:,}/{pace.total:,}", f"loss {line['loss']:.3f}"]
    if "difficulty" in line:  # HTM mixes
        parts.append(f"mixed {line['mixed_samples']:.3g} ({line['mixed_tokens']:.0f} tokens)")
    parts.append(f"{timedelta(seconds=round(pace.left(step)))} left")
    return "  ".join(parts)


def describe(sums: Sums, number: int, of: int, mixes: bool, log: list[Line], left: float) -> str:
    """Returns the line of epoch `number`, with `left` seconds to go."""
    loss, mixed, tokens = means(sums)
    parts = [f"epoch {number:>{len(str(of))}}/{of}", f"loss {loss:.3f}"]
    if mixes:
        parts.append(f"mixed {mixed:.3g} ({tokens:.0f} tokens)")
    if log and log[-1]["epoch"] == number:
        name = "val" if "val_top1" in log[-1] else "top-1"
        parts.append(f"{name} {accuracy(log[-1]):.2f} %")
    if number < of:
        parts.append(f"{timedelta(seconds=round(left))} left")
    return "  ".join(parts)


def mixing(epochs: list[Sums], images: int) -> dict[str, float | None]:
    """Mixed samples of a batch and tokens in each in the last epoch, and the share of all images.

    `epochs`: complete ones.
    """
    if not epochs:
        return dict.fromkeys(("mixed_samples", "mixed_tokens", "mixed_share"))
    _, mixed, tokens = means(epochs[-1])
    share = sum(of_epoch for _, _, of_epoch, _ in epochs) / images
    return {
        "mixed_samples": mixed,
        "mixed_tokens": tokens if mixed else None,
        "mixed_share": round(share, 4),
    }


def accuracies(log: list[Line], tests: list[Line]) -> dict[str, Any]:
    """Returns the accuracies of a run for summary.json.

    With a validation split, `tests` are the results of the last and of the best epoch, by
    validation, on the test set; accuracies over all epochs are null.
    """
    last, selected = log[-1], best(log)
    if tests:
        return {
            "top1_last": tests[0]["top1"],
            "top5_last": tests[0]["top5"],
            "top1_selected": tests[1]["top1"],
            "top5_selected": tests[1]["top5"],
            "selected_epoch": selected["epoch"],
            "val_top1_last": last["val_top1"],
            "val_top1_selected": selected["val_top1"],
            "top1_best": None,
            "top1_median10": None,
            "top5_best": None,
        }
    late = [line["top1"] for line in log if line["epoch"] > last["epoch"] - MEDIAN_EPOCHS]
    return {
        "top1_last": last["top1"],
        "top1_best": selected["top1"],
        "top1_median10": median(late),
        "top5_last": last["top5"],
        "top5_best": max(line["top5"] for line in log),
    }
