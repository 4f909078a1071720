"""The paper's Tables 1 and 2 as printed, beside the configuration of each row's model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

PAPER = Path(__file__).with_name("paper.yaml")


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """One row: parameters in millions, MACs in billions, accuracies in percent."""

    table: Literal[1, 2]
    section: Literal["convolutional", "transformer"]
    row: str
    model: str
    classes: int
    stack: Sequence[str] = ()
    overrides: Sequence[str] = ()
    parameters: float | None = None
    macs: float | None = None
    cifar10: float | None = None
    cifar100: float | None = None
    top1: float | None = None
    top5: float | None = None
    parameters_note: str | None = None
    macs_note: str | None = None

    @property
    def command_line(self) -> list[str]:
        """What configures the row's model, with the HTM and VTM of its stack."""
        return [f"model={self.model}", f"augmentation=[{','.join(self.stack)}]", *self.overrides]


def read_paper() -> list[PaperRow]:
    """All 29 rows in the paper's order."""
    return [PaperRow(**entry) for entry in yaml.safe_load(PAPER.read_text())]
