"""Updates that are not finite: the first one ends a run, or they are left out and counted.

float16's scaler leaves out those whose gradient has overflown, whatever the run does with others.
"""

import math
from itertools import takewhile
from typing import Any

from reproduction.errors import PlainError

MOST_IN_A_ROW = 100  # so many are no accident
ADVICE = "try a lower recipe.lr, a recipe.clip_grad_norm or recipe.precision=float32"

Line = dict[str, Any]


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
