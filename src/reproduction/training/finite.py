"""Updates that are not finite: the first one ends a run, or they are left out and counted."""

import math
from itertools import takewhile
from typing import Any

from reproduction.errors import PlainError

MOST_IN_A_ROW = 100  # more are no accident
ADVICE = "try a lower recipe.lr, a recipe.clip_grad_norm or recipe.precision=float32"

Line = dict[str, Any]


class NonFinite:
    """Follows the lines of a run, whose `skipped` is 1 where loss or gradient is not finite."""

    def __init__(self, skips: bool):
        self.skips = skips
        self.skipped = self.in_a_row = 0

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]

    def writable(self, lines: list[Line]) -> list[Line]:
        """What is written of them: up to one that ends the run, or with null for what is lost."""
        if self.skips:
            return [{key: _or_none(value) for key, value in line.items()} for line in lines]
        good = takewhile(lambda line: not line["skipped"], lines)
        return [{key: value for key, value in line.items() if key != "skipped"} for line in good]

    def check(self, lines: list[Line]) -> None:
        """Counts; PlainError at what ends the run."""
        for line in lines:
            self.skipped += line["skipped"]
            self.in_a_row = self.in_a_row + 1 if line["skipped"] else 0
            if line["skipped"] and not self.skips:
                raise not_finite(line["step"], _what(line))
            if self.in_a_row > MOST_IN_A_ROW:
                often = f"more than {MOST_IN_A_ROW} updates in a row were left out"
                raise PlainError(f"step {line['step']}: {often}, {_what(line)}; {ADVICE}")


def not_finite(step: int, what: str) -> PlainError:
    """The error of a run that does not skip."""
    return PlainError(f"step {step}: {what}; {ADVICE}; recipe.non_finite=skip leaves them out")


def _what(line: Line) -> str:
    if math.isfinite(line["loss"]):
        return "the gradient is not finite"
    return f"the loss is {line['loss']}"


def _or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
