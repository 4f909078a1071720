"""The cells of the paper's tables that were trained, as printed."""

from dataclasses import dataclass
from pathlib import Path

import yaml

CELLS = Path(__file__).with_name("cells.yaml")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell: the experiment that trains it here and the printed accuracy in percent (and ms).

    `baseline` is the experiment that it is compared with; None for a baseline.
    """

    experiment: str
    row: str
    column: str
    baseline: str | None
    top1: float
    top5: float | None = None
    latency_ms: float | None = None

    @property
    def table(self) -> int:
        return int(self.experiment.partition("/")[0].removeprefix("table"))


def read_cells() -> list[Cell]:
    """All 29 cells in the paper's order."""
    return [Cell(**entry) for entry in yaml.safe_load(CELLS.read_text())]
