"""Metrics of every batch, kept on the device and fetched together; which of them end a run.

The first update that is not finite ends it, or such are left out and counted. float16's scaler
leaves out those whose gradient has overflown, whatever the run does with others.
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

MOST_IN_A_ROW = 100  # so many are no accident
ADVICE = "try a lower recipe.lr, a recipe.clip_grad_norm or recipe.precision=float32"

Line = dict[str, Any]


class BatchMetrics:
    """Collects a row per micro-batch; `fetch` turns them into lines of metrics.jsonl."""

    def __init__(self, world: World):
        self.world = world
        self.zero = torch.zeros((), device=world.device)
        self.rows: list[Tensor] = []
        self.images: list[int] = []  # of each batch
        self.known: list[dict[str, Any]] = []
        self.layers: list[int] = []  # of HTM
        self.seconds = 0.0  # that all fetched batches took
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves out of all speeds what was not training."""
        self.start = time.perf_counter()

    def add(
        self,
        step: int,
        epoch: int,
        lr: float,
        parts: list[MicroBatch],
        not_finite: Tensor | None = None,
    ) -> None:
        """Keeps a batch, of as many micro-batches as all others; copies nothing to the host."""
        self.layers = [mix.layer for mix in parts[0].output.layers]
        flag = self.zero if not_finite is None else not_finite
        for part in parts:
            self.rows.append(torch.stack([flag, *_row(*part)]))
            flag = self.zero
        images = sum(len(part.output.logits) for part in parts)
        self.images.append(images)
        self.known.append({"step": step, "epoch": epoch, "lr": lr})

    def fetch(self) -> list[dict[str, Any]]:
        """One line per kept batch, over all ranks, and starts anew.

        `skipped` is 1 where loss or gradient is not finite.
        """
        if not self.rows:
            return []
        rows = torch.stack(self.rows).double()
        rows = rows.unflatten(0, (len(self.known), -1))  # batch, micro-batch, column
        images = rows.new_tensor(self.images)[:, None]
        sums = self.world.sum(torch.cat([images, rows.sum(dim=1)], dim=1))
        tops = self.world.max(rows[:, :, COLUMNS + 1 :: COLUMNS].amax(dim=1))
        table = torch.cat([sums, tops], dim=1).tolist()  # the wait for the device
        elapsed = time.perf_counter() - self.start
        self.seconds += elapsed
        speed = sum(row[0] for row in table) / elapsed
        lines = [
            {**known, **self._line(row, sums.shape[1]), "images_per_second": round(speed, 1)}
            for known, row in zip(self.known, table, strict=True)
        ]
        self.rows, self.images, self.known = [], [], []
        self.restart_clock()
        return lines

    def _line(self, row: list[float], width: int) -> dict[str, Any]:
        """What `width` sums, and maxima behind, tell of all of HTM's layers, of several of each."""
        images, flag, loss, *columns = row[:width]
        tops = row[width:]
        line: Line = {
            "loss": loss / images,
            "skipped": int(flag > 0 or not math.isfinite(loss)),
            **{"mixed_samples": 0, "mixed_tokens": 0.0},
            **dict.fromkeys(("score_loss", "difficulty", "gain_max", "gain_mean")),
        }
        if columns:
            line["score_loss"] = columns[3] / images
        layers = len(self.layers)
        names = ["", *(f"/{layer}" for layer in self.layers)]
        for name, place, top in zip(names, range(0, len(columns), COLUMNS), tops, strict=False):
            mixed, tokens, gain, difficulty = columns[place : place + 4]
            line[f"mixed_samples{name}"] = round(mixed)
            line[f"mixed_tokens{name}"] = tokens / mixed if mixed else 0.0
            line[f"difficulty{name}"] = difficulty / images / (1 if name else layers)
            line[f"gain_max{name}"] = top
            line[f"gain_mean{name}"] = gain / tokens if tokens else 0.0
        return line


COLUMNS = 5  # of HTM, after flag and loss


def _row(loss: Tensor, output: Output) -> list[Tensor]:
    """The summed loss, and of HTM the same COLUMNS of all layers, and of several of each.

    Mixed samples, replaced tokens, what they gain and the difficulty are sums; the last one is
    the largest gain.
    """
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
    sums = (x.sum(dtype=torch.float32) for x in (is_easy, mask, gain))
    return [*sums, difficulty.detach(), gain.amax()]


class NonFinite:
    """Follows the lines of a run, whose `skipped` is 1 where loss or gradient is not finite.

    `skips`: such updates are left out; `scales`: those are whose loss is finite, by the scaler.
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
        """Whether updates can be left out."""
        return self.skips or self.scales

    def writable(self, lines: list[Line]) -> list[Line]:
        """What is written of them: up to one that ends the run, and with null for what is lost."""
        good = [_with_null(line) for line in takewhile(lambda line: not self._ends(line), lines)]
        if not self.counts:
            for line in good:
                del line["skipped"]
        return good

    def check(self, lines: list[Line]) -> None:
        """Counts; PlainError at what ends the run."""
        for line in lines:
            if self._ends(line):
                raise not_finite(line["step"], _what(line))
            self.skipped += line["skipped"]
            self.in_a_row = self.in_a_row + 1 if line["skipped"] else 0
            if self.in_a_row >= MOST_IN_A_ROW:
                often = f"{MOST_IN_A_ROW} updates in a row were left out"
                raise PlainError(f"step {line['step']}: {often}, {_what(line)}; {ADVICE}")

    def _ends(self, line: Line) -> bool:
        """Whether the run must not go on over this line."""
        is_left_out = self.skips or (self.scales and math.isfinite(line["loss"]))
        return bool(line["skipped"]) and not is_left_out


def not_finite(step: int, what: str) -> PlainError:
    """The error of a run that does not skip."""
    return PlainError(f"step {step}: {what}; {ADVICE}; recipe.non_finite=skip leaves them out")


def _what(line: Line) -> str:
    if math.isfinite(line["loss"]):
        return "the gradient is not finite"
    return f"the loss is {line['loss']}"


def _with_null(line: Line) -> Line:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in line.items()
    }
