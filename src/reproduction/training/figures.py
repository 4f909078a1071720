"""The figures of a run: those of every batch, collected on the device, and those of its epochs.

A line is a batch in metrics.jsonl. An epoch is a dictionary with the sums over its batches so far
and, once it is evaluated, the results of that.
"""

import math
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

from reproduction.system import PlainError, clock_time
from reproduction.training.ranks import World
from reproduction.training.stop import ADVICE
from tokenmixup.output import Stat

Line = dict[str, Any]
Epoch = dict[str, Any]

MEDIAN_EPOCHS = 10
SUMS = ("batches", "loss", "mixed", "tokens")  # over the batches of an epoch


class BatchFigures:
    """Collects the scalars of batches on the device; `fetch` turns them into metrics.jsonl's lines.

    It knows no names: they are the keys of what it is given.
    """

    def __init__(self, world: World):
        self.world = world
        # of each batch: its first columns; images; micro-batch x name x total and divisor
        self.batches: list[tuple[Line, int, Tensor]] = []
        self.stats: dict[str, Stat] = {}  # of the last micro-batch
        self.constants: dict[float, Tensor] = {}
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
            self._on_device(0.0 if value is None else value)
            for stats in micro_batches
            for total, divisor, _ in stats.values()
            for value in (total, divisor)
        ]
        shape = len(micro_batches), len(self.stats), 2
        self.batches.append((head, images, torch.stack(values).view(shape)))

    def _on_device(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value
        if value not in self.constants:  # as a launch costs more than to look it up
            self.constants[value] = torch.full((), float(value), device=self.world.device)
        return self.constants[value]

    def fetch(self) -> tuple[list[Line], float]:
        """Returns a line for each collected batch, over all ranks, and the seconds of all."""
        if not self.batches:
            return [], 0.0
        heads, images, rows = zip(*self.batches, strict=True)
        table = torch.stack(rows).double()  # batch, micro-batch, name, total and divisor
        sums, maxima = self.world.sum(table.sum(dim=1)), self.world.max(table.amax(dim=1))
        both = torch.cat([sums, maxima[..., :1]], dim=-1).tolist()  # waits for the device
        seconds = time.perf_counter() - self.start
        speed = {"images_per_second": round(sum(images) / seconds, 1)}
        self.batches = []
        self.restart_clock()
        return [
            {**head, **self._values(row), **speed} for head, row in zip(heads, both, strict=True)
        ], seconds

    def _values(self, row: list[list[float]]) -> Line:
        values: Line = {}
        for (name, stat), (total, divisor, largest) in zip(self.stats.items(), row, strict=True):
            value = largest if stat.is_max else total
            if stat.divisor is None:
                values[name] = int(value) if value.is_integer() else value
            else:
                values[name] = value / divisor if divisor else 0.0
        return values


def checked(lines: list[Line], scales: bool) -> tuple[list[Line], PlainError | None]:
    """Returns the good lines, and the error of the update that follows them and ends the run.

    A line has `skipped` = 1 if its loss or a gradient is not finite. If float16's scaler `scales`,
    it has skipped the update, and the run goes on, as long as the loss is finite.
    """
    for number, line in enumerate(lines):
        if line["skipped"] and not (scales and math.isfinite(line["loss"])):
            reason = f"the loss is {line['loss']}"
            if math.isnan(line.get("gain_max", 0.0)):  # of a GPU, where no exception tells it
                reason = "the saliency gain is not finite: the model has diverged"
            elif math.isfinite(line["loss"]):
                reason = "the gradient is not finite"
            return lines[:number], PlainError(f"step {line['step']}: {reason}; {ADVICE}")
    return lines, None


def begun(epoch: int) -> Epoch:
    """Returns the figures of an epoch, counted from 1, before its first batch."""
    return {"epoch": epoch, **dict.fromkeys(SUMS, 0.0)}


def add(epoch: Epoch, lines: list[Line]) -> None:
    """Adds the lines of batches to their epoch; updates that were skipped do not count."""
    for line in lines:  # one by one, so that the sums do not depend on when a run was resumed
        if not line["skipped"]:
            mixed = line["mixed_samples"]
            values = 1, line["loss"], mixed, mixed * line["mixed_tokens"]
            for name, value in zip(SUMS, values, strict=True):
                epoch[name] += value


def of_validation(result: Line) -> Line:
    """Names the results of a validation split: val_top1, val_top5, val_loss."""
    return {f"val_{key.removeprefix('eval_')}": value for key, value in result.items()}


def evaluations(epochs: list[Epoch]) -> list[Line]:
    """Returns the results of those that were evaluated, as in metrics.jsonl."""
    return [
        {key: value for key, value in epoch.items() if key not in SUMS}
        for epoch in epochs
        if len(epoch) > len(SUMS) + 1
    ]


def top1_of(epochs: list[Epoch]) -> list[float]:
    """The accuracy of each evaluated epoch, on the validation split if there is one."""
    return [line["val_top1" if "val_top1" in line else "top1"] for line in evaluations(epochs)]


def best_epoch(epochs: list[Epoch]) -> int:
    """The first epoch with the highest accuracy."""
    top1 = top1_of(epochs)
    best: int = evaluations(epochs)[top1.index(max(top1))]["epoch"]
    return best


def describe(epochs: list[Epoch], of: int, mixes: bool, left: float) -> str:
    """Returns the line of the last epoch, `of` how many, with `left` seconds to go."""
    last, number = epochs[-1], len(epochs)
    batches, loss, mixed, tokens = (last[name] for name in SUMS)
    parts = [f"epoch {number:>{len(str(of))}}/{of}", f"loss {loss / max(batches, 1):.3f}"]
    if mixes:
        parts.append(f"mixed {mixed / max(batches, 1):.3g} ({tokens / max(mixed, 1):.0f} tokens)")
    if evaluations([last]):
        name = "val" if "val_top1" in last else "top-1"
        parts.append(f"{name} {top1_of([last])[0]:.2f} %")
    if number < of:
        parts.append(f"{clock_time(left)} left")
    return "  ".join(parts)


def mixing(epochs: list[Epoch], batch_size: float) -> dict[str, float | None]:
    """Returns mixed samples per batch and tokens in each of the last epoch, and the share of all.

    `epochs`: complete ones; `batch_size`: the mean over all their batches.
    """
    if not epochs:
        return dict.fromkeys(("mixed_samples", "mixed_tokens", "mixed_share"))
    batches, _, mixed, tokens = (epochs[-1][name] for name in SUMS)
    share = sum(x["mixed"] for x in epochs) / max(sum(x["batches"] for x in epochs), 1)
    return {
        "mixed_samples": mixed / max(batches, 1),
        "mixed_tokens": tokens / mixed if mixed else None,
        "mixed_share": round(share / max(batch_size, 1), 4),
    }


def accuracies(epochs: list[Epoch], tests: list[Line] | None = None) -> dict[str, Any]:
    """Returns the accuracies of a run for summary.json.

    With a validation split, `tests` are the results of the last and of the best epoch, by
    validation, on the test set; accuracies over all epochs are null.
    """
    top1, results = top1_of(epochs), evaluations(epochs)
    if tests is not None:
        last, selected = tests
        return {
            "top1_last": last["top1"],
            "top5_last": last["top5"],
            "top1_selected": selected["top1"],
            "top5_selected": selected["top5"],
            "selected_epoch": best_epoch(epochs),
            "val_top1_last": top1[-1],
            "val_top1_selected": max(top1),
            **dict.fromkeys(("top1_best", "top1_median10", "top5_best")),
        }
    return {
        "top1_last": top1[-1],
        "top1_best": max(top1),
        "top1_median10": median(x["top1"] for x in evaluations(epochs[-MEDIAN_EPOCHS:])),
        "top5_last": results[-1]["top5"],
        "top5_best": max(x["top5"] for x in results),
    }
