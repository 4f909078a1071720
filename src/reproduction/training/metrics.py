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
from reproduction.training.step import Part
from tokenmixup import Output

MOST_IN_A_ROW = 100  # so many are no accident
ADVICE = "try a lower recipe.lr, a recipe.clip_grad_norm or recipe.precision=float32"

Line = dict[str, Any]


class BatchMetrics:
    """Collects one row of sums per batch; `fetch` turns them into lines of metrics.jsonl."""

    def __init__(self, world: World):
        self.world = world
        self.zero = torch.zeros((), device=world.device)
        self.rows: list[Tensor] = []
        self.known: list[dict[str, Any]] = []
        self.layers: list[int] = []  # of HTM
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves out of images/s what was not training."""
        self.start = time.perf_counter()

    def add(
        self, step: int, epoch: int, lr: float, parts: list[Part], not_finite: Tensor | None = None
    ) -> None:
        """Keeps a batch of one micro-batch or more; nothing is copied to the host."""
        self.layers = [mix.layer for mix in parts[0].output.layers]
        first, *others = (self._sums(*part) for part in parts)
        if not_finite is not None:
            first[-1] = not_finite
        self.rows.append(sum(map(torch.stack, others), start=torch.stack(first)))
        images = sum(len(part.output.logits) for part in parts)
        self.known.append({"step": step, "epoch": epoch, "lr": lr, "images": images})

    def _sums(self, loss: Tensor, output: Output) -> list[Tensor]:
        """Loss, what HTM has done, of several layers also at each, and a place for the flag.

        What it has done: mixed samples and tokens, ScoreNet's loss.
        """
        n = len(output.logits)
        if output.is_easy is None or output.mask is None or output.score_loss is None:
            return [loss * n, *[self.zero] * 4]
        row = [loss * n, *_counts(output.is_easy, output.mask, output.score_loss * n)]
        for mix in output.layers if len(output.layers) > 1 else ():
            row += _counts(mix.is_easy, mix.mask, mix.difficulty.sum())
        return [*row, self.zero]

    def fetch(self) -> list[dict[str, Any]]:
        """One line per kept batch, summed over ranks, and starts anew.

        `skipped` is 1 where loss or gradient is not finite.
        """
        if not self.rows:
            return []
        images = torch.tensor([known["images"] for known in self.known], device=self.zero.device)
        sums = torch.cat([images[:, None], torch.stack(self.rows)], dim=1).double()
        table = self.world.sum(sums).tolist()
        elapsed = time.perf_counter() - self.start
        images_per_second = sum(row[0] for row in table) / elapsed
        lines = [
            self._line(known, row, images_per_second)
            for known, row in zip(self.known, table, strict=True)
        ]
        self.rows, self.known = [], []
        self.restart_clock()
        return lines

    def _line(self, known: dict[str, Any], row: list[float], speed: float) -> dict[str, Any]:
        n, loss, mixed, tokens, score_loss, *of_layers, flag = row
        line = {
            "step": known["step"],
            "epoch": known["epoch"],
            "loss": loss / n,
            "lr": known["lr"],
            "images_per_second": round(speed, 1),
            "mixed_samples": round(mixed),
            "mixed_tokens": tokens / mixed if mixed else 0.0,
            "score_loss": score_loss / n if self.layers else None,
            "difficulty": score_loss / n / len(self.layers) if self.layers else None,
            "skipped": int(flag > 0 or not math.isfinite(loss)),
        }
        names = self.layers if of_layers else []
        for layer, mixed, tokens, difficulty in zip(
            names, of_layers[::3], of_layers[1::3], of_layers[2::3], strict=True
        ):
            line[f"mixed_samples/{layer}"] = round(mixed)
            line[f"mixed_tokens/{layer}"] = tokens / mixed if mixed else 0.0
            line[f"difficulty/{layer}"] = difficulty / n
        return line


def _counts(is_easy: Tensor, mask: Tensor, difficulty: Tensor) -> list[Tensor]:
    """Mixed samples, replaced tokens, and the difficulty as it is."""
    sums = (x.sum(dtype=torch.float32) for x in (is_easy, mask))
    return [*sums, difficulty.detach()]


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
