"""Metrics of every batch, kept on the device and fetched together."""

import math
import time
from typing import Any

import torch
from torch import Tensor

from reproduction.training.distributed import World
from reproduction.training.update import Part
from tokenmixup import Output


class BatchMetrics:
    """Collects one row of sums per batch; `fetch` turns them into lines of metrics.jsonl."""

    def __init__(self, world: World):
        self.world = world
        self.rows: list[Tensor] = []
        self.known: list[dict[str, Any]] = []
        self.has_score = False
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves out of images/s what was not training."""
        self.start = time.perf_counter()

    def add(
        self, step: int, epoch: int, lr: float, parts: list[Part], not_finite: Tensor | None = None
    ) -> None:
        """Keeps a batch of one micro-batch or more; nothing is copied to the host."""
        self.has_score = parts[0].output.score_loss is not None
        sums = torch.stack([self._sums(*part) for part in parts]).sum(dim=0)
        flag = torch.zeros_like(sums[0]) if not_finite is None else not_finite.double()
        self.rows.append(torch.cat([sums, flag[None]]))
        self.known.append({"step": step, "epoch": epoch, "lr": lr})

    @staticmethod
    def _sums(loss: Tensor, output: Output) -> Tensor:
        """A row: images, loss, mixed samples and tokens, ScoreNet's loss, difficulty."""
        n, stats, score_loss = len(output.logits), output.stats, output.score_loss
        zero = torch.zeros((), device=loss.device)
        row = [
            torch.full((), float(n), device=loss.device),
            loss * n,
            stats["mixed_samples"],
            stats["mixed_tokens"] * stats["mixed_samples"],
            zero if score_loss is None else score_loss.detach() * n,
            stats.get("difficulty", zero) * n,
        ]
        return torch.stack([value.double() for value in row])

    def fetch(self) -> list[dict[str, Any]]:
        """One line per kept batch, summed over ranks, and starts anew.

        `skipped` is 1 where loss or gradient is not finite.
        """
        if not self.rows:
            return []
        table = self.world.sum(torch.stack(self.rows)).tolist()
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
        n, loss, mixed, tokens, score_loss, difficulty, flag = row
        return {
            "step": known["step"],
            "epoch": known["epoch"],
            "loss": loss / n,
            "lr": known["lr"],
            "images_per_second": round(speed, 1),
            "mixed_samples": round(mixed),
            "mixed_tokens": tokens / mixed if mixed else 0.0,
            "score_loss": score_loss / n if self.has_score else None,
            "difficulty": difficulty / n if self.has_score else None,
            "skipped": int(flag > 0 or not math.isfinite(loss)),
        }
