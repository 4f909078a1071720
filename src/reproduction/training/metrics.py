"""Metrics of every batch, collected on the device and fetched together.

An update that is not finite ends the run. float16's scaler skips updates whose gradients overflow,
which are counted.
"""

import math
import time
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from reproduction.system.errors import PlainError
from reproduction.training.distributed import World
from tokenmixup.output import Stat

STAT_PARTS = ("total", "divisor")  # of a Stat
MOST_IN_A_ROW = 100  # skipped updates that end the run
ADVICE = "try a lower recipe.lr, a recipe.clip_grad_norm or recipe.precision=float32"

Line = dict[str, Any]


class BatchMetrics:
    """Collects the scalars of batches on the device; `fetch` turns them into metrics.jsonl's lines.

    It knows no names: they are the keys of what it is given.
    """

    def __init__(self, world: World):
        self.world = world
        # of each batch: its first columns; images; micro-batch x column: on the device, on the host
        self.batches: list[tuple[Line, int, Tensor, list[list[float]]]] = []
        self.columns: list[tuple[str, str]] = []  # name, part of its Stat: first the device's
        self.kinds: dict[str, tuple[bool, bool]] = {}  # name -> is it a maximum, has it a divisor
        self.seconds = 0.0  # spent on all fetched batches
        self.restart_clock()

    def restart_clock(self) -> None:
        """Restarts the clock, to keep other work than training out of the throughput."""
        self.start = time.perf_counter()

    def add(self, head: Line, images: int, micro_batches: list[dict[str, Stat]]) -> None:
        """Collects a batch without waiting for the device; all have equally many micro-batches.

        `head` begins the line, `images` counts those of all ranks.
        """
        device, host = list[list[Tensor]](), list[list[float]]()
        for stats in micro_batches:
            scalars = {
                (name, part): getattr(x, part) for name, x in stats.items() for part in STAT_PARTS
            }
            on_device = {key: x for key, x in scalars.items() if isinstance(x, Tensor)}
            on_host = {key: x for key, x in scalars.items() if isinstance(x, int | float)}
            device.append([*on_device.values()])
            host.append([*on_host.values()])
            self.columns = [*on_device, *on_host]
            self.kinds = {name: (x.is_max, x.divisor is not None) for name, x in stats.items()}
        rows = torch.stack([x for row in device for x in row]).unflatten(0, (len(device), -1))
        # one statement, so that a signal leaves no half of a batch
        self.batches.append((head, images, rows, host))

    def fetch(self) -> list[Line]:
        """Returns one line per collected batch, over all ranks, and clears the collection."""
        if not self.batches:
            return []
        heads, images, device, host = zip(*self.batches, strict=True)
        rows = torch.stack(device).double()  # batch, micro-batch, column
        rows = torch.cat([rows, rows.new_tensor(host)], dim=2)
        sums, maxima = self.world.sum(rows.sum(dim=1)), self.world.max(rows.amax(dim=1))
        table = torch.stack([sums, maxima], dim=1).tolist()  # waits for the device
        elapsed = time.perf_counter() - self.start
        self.seconds += elapsed
        speed = {"images_per_second": round(sum(images) / elapsed, 1)}
        lines = [
            {**head, **self._values(*values), **speed}
            for head, values in zip(heads, table, strict=True)
        ]
        self.batches = []
        self.restart_clock()
        return lines

    def _values(self, sums: list[float], maxima: list[float]) -> Line:
        """The value of each name, from the sums and the maxima of all columns."""
        of_sum, of_max = (dict(zip(self.columns, x, strict=True)) for x in (sums, maxima))
        values: Line = {}
        for name, (is_max, is_quotient) in self.kinds.items():
            value = (of_max if is_max else of_sum)[name, "total"]
            if is_quotient:
                divisor = of_sum[name, "divisor"]
                values[name] = value / divisor if divisor else 0.0
            else:
                values[name] = int(value) if value.is_integer() else value
        return values


class NonFinite:
    """Counts the skipped updates of a run and finds the update that ends it.

    Lines have `skipped` = 1 if the loss or a gradient is not finite. With `scales` the scaler has
    skipped the update if the loss is finite.
    """

    def __init__(self, scales: bool):
        self.scales = scales
        self.skipped = self.in_a_row = 0

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]

    def writable(self, lines: list[Line]) -> list[Line]:
        """The lines before the first update that ends the run, with `skipped` if it may be 1."""
        left_out = () if self.scales else ("skipped",)
        return [
            {key: value for key, value in line.items() if key not in left_out}
            for line in takewhile(lambda line: not self._ends(line), lines)
        ]

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
        return bool(line["skipped"]) and not (self.scales and math.isfinite(line["loss"]))


def non_finite_error(step: int, cause: str) -> PlainError:
    """The error of an update that ends the run."""
    return PlainError(f"step {step}: {cause}; {ADVICE}")


def _cause(line: Line) -> str:
    if math.isnan(line.get("gain_max", 0.0)):  # of a GPU, where no exception tells it
        return "the saliency gain is not finite: the model has diverged"
    if math.isfinite(line["loss"]):
        return "the gradient is not finite"
    return f"the loss is {line['loss']}"
