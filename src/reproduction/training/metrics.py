"""Metrics of every batch, collected on the device and fetched together.

A non-finite update ends the run, or is skipped and counted. float16's scaler always skips updates
whose gradients overflow.
"""

import math
import time
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from reproduction.system.errors import PlainError
from reproduction.training.distributed import World
from reproduction.training.step import MicroBatch
from tokenmixup import Output

COLUMNS = 5  # of HTM, for all layers or one, see `_columns`; a row starts with flag and loss
MOST_IN_A_ROW = 100  # skipped updates that end the run
ADVICE = "try a lower recipe.lr, a recipe.clip_grad_norm or recipe.precision=float32"

Line = dict[str, Any]


class BatchMetrics:
    """Collects one row per micro-batch; `fetch` turns the rows into lines of metrics.jsonl."""

    def __init__(self, world: World):
        self.world = world
        self.zero = torch.zeros((), device=world.device)
        # of each batch: step, epoch and learning rate; images; a row of each micro-batch
        self.batches: list[tuple[Line, int, list[Tensor]]] = []
        self.layers: list[int] = []  # of HTM
        self.seconds = 0.0  # spent on all fetched batches
        self.restart_clock()

    def restart_clock(self) -> None:
        """Restarts the clock, to keep other work than training out of the throughput."""
        self.start = time.perf_counter()

    def add(
        self,
        step: int,
        epoch: int,
        lr: float,
        micro_batches: list[MicroBatch],
        not_finite: Tensor | None = None,
    ) -> None:
        """Collects a batch without waiting for the device; all have equally many micro-batches."""
        self.layers = [mix.layer for mix in micro_batches[0].output.layers]
        rows = list[Tensor]()
        flag = self.zero if not_finite is None else not_finite
        for micro_batch in micro_batches:
            rows.append(torch.stack([flag, *_row(*micro_batch)]))
            flag = self.zero
        images = sum(len(micro_batch.output.logits) for micro_batch in micro_batches)
        # one statement, so that a signal leaves no half of a batch
        self.batches.append(({"step": step, "epoch": epoch, "lr": lr}, images, rows))

    def fetch(self) -> list[Line]:
        """Returns one line per collected batch, summed over all ranks, and clears the collection.

        `skipped` is 1 if the loss or a gradient is not finite.
        """
        if not self.batches:
            return []
        heads, counts, parts = zip(*self.batches, strict=True)
        rows = torch.stack([row for part in parts for row in part]).double()
        rows = rows.unflatten(0, (len(heads), -1))  # batch, micro-batch, column
        images = rows.new_tensor(counts)[:, None]
        sums = self.world.sum(torch.cat([images, rows.sum(dim=1)], dim=1))
        maxima = self.world.max(rows[:, :, COLUMNS + 1 :: COLUMNS].amax(dim=1))
        table = torch.cat([sums, maxima], dim=1).tolist()  # waits for the device
        elapsed = time.perf_counter() - self.start
        self.seconds += elapsed
        speed = sum(row[0] for row in table) / elapsed
        lines = [
            {**head, **self._line(row, sums.shape[1]), "images_per_second": round(speed, 1)}
            for head, row in zip(heads, table, strict=True)
        ]
        self.batches = []
        self.restart_clock()
        return lines

    def _line(self, row: list[float], width: int) -> Line:
        """Turns `width` sums, followed by the maxima, into named metrics.

        Those of HTM are over all its layers, and if it has several also of each layer.
        """
        images, flag, loss, *columns = row[:width]
        maxima = row[width:]
        line: Line = {
            "loss": loss / images,
            "skipped": int(flag > 0 or not math.isfinite(loss)),
            "mixed_samples": 0,
            "mixed_tokens": 0.0,
            **dict.fromkeys(("score_loss", "difficulty", "gain_max", "gain_mean")),
        }
        if columns:
            line["score_loss"] = columns[3] / images
        suffixes = ["", *(f"/{layer}" for layer in self.layers)]
        starts = range(0, len(columns), COLUMNS)
        for suffix, start, maximum in zip(suffixes, starts, maxima, strict=False):
            mixed, tokens, gain, difficulty = columns[start : start + 4]
            line[f"mixed_samples{suffix}"] = round(mixed)
            line[f"mixed_tokens{suffix}"] = tokens / mixed if mixed else 0.0
            line[f"difficulty{suffix}"] = difficulty / images / (1 if suffix else len(self.layers))
            line[f"gain_max{suffix}"] = maximum
            line[f"gain_mean{suffix}"] = gain / tokens if tokens else 0.0
        return line


def _row(loss: Tensor, output: Output) -> list[Tensor]:
    """The summed loss, then COLUMNS of all HTM layers and, if there are several, of each layer."""
    n = len(output.logits)
    row = [loss * n]
    if output.is_easy is not None:
        assert output.mask is not None and output.gain is not None
        assert output.score_loss is not None
        row += _columns(output.is_easy, output.mask, output.gain, output.score_loss * n)
    for mix in output.layers if len(output.layers) > 1 else ():
        row += _columns(mix.is_easy, mix.mask, mix.gain, mix.difficulty.sum())
    return row


def _columns(is_easy: Tensor, mask: Tensor, gain: Tensor, difficulty: Tensor) -> list[Tensor]:
    """Sums of mixed samples, replaced tokens, gains and difficulty, then the largest gain."""
    sums = (x.sum(dtype=torch.float32) for x in (is_easy, mask, gain))
    return [*sums, difficulty.detach(), gain.amax()]


class NonFinite:
    """Counts the skipped updates of a run and finds the update that ends it.

    Lines have `skipped` = 1 if the loss or a gradient is not finite. With `skips` all such updates
    are skipped; with `scales` those with a finite loss are, by the scaler.
    """

    def __init__(self, skips: bool, scales: bool = False):
        self.skips, self.scales = skips, scales
        self.skipped = self.in_a_row = 0

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]

    @property
    def counts(self) -> bool:
        """Whether updates can be skipped."""
        return self.skips or self.scales

    def writable(self, lines: list[Line]) -> list[Line]:
        """The lines before the first update that ends the run, with null for non-finite values."""
        good = [_with_null(line) for line in takewhile(lambda line: not self._ends(line), lines)]
        if not self.counts:
            for line in good:
                del line["skipped"]
        return good

    def check(self, lines: list[Line]) -> None:
        """Counts skipped updates; raises PlainError if one, or too many in a row, end the run."""
        for line in lines:
            if self._ends(line):
                raise non_finite_error(line["step"], _cause(line))
            self.skipped += line["skipped"]
            self.in_a_row = self.in_a_row + 1 if line["skipped"] else 0
            if self.in_a_row >= MOST_IN_A_ROW:
                count = f"{MOST_IN_A_ROW} updates in a row were skipped"
                raise PlainError(f"step {line['step']}: {count}, {_cause(line)}; {ADVICE}")

    def _ends(self, line: Line) -> bool:
        """Whether the run ends at this line."""
        is_skipped = self.skips or (self.scales and math.isfinite(line["loss"]))
        return bool(line["skipped"]) and not is_skipped


def non_finite_error(step: int, cause: str) -> PlainError:
    """The error of a run that does not skip non-finite updates."""
    return PlainError(f"step {step}: {cause}; {ADVICE}; recipe.non_finite=skip skips such updates")


def _cause(line: Line) -> str:
    if math.isfinite(line["loss"]):
        return "the gradient is not finite"
    return f"the loss is {line['loss']}"


def _with_null(line: Line) -> Line:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in line.items()
    }
