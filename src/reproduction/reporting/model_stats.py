"""Tables 1 and 2 as printed, beside the parameters and MACs of the models of their rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import yaml
from rich.table import Table

from reproduction.config import Config

PAPER = Path(__file__).with_name("paper.yaml")
TOLERANCE = 0.005
COLUMNS = (
    *("table", "row", "model", "pixels", "classes", "params (M)", "paper (M)"),
    *("MACs (G)", "conv + linear", "paper (G)", "verdict"),
)
CAPTION = (
    "MACs: one image in evaluation, half the FLOPs of torch's FlopCounterMode (convolutions, "
    "linear layers, attention matmuls); conv + linear: without the matmuls of attention. "
    f"matches: equal after rounding to the printed digits, or within {TOLERANCE:.1%}; for MACs, "
    "one of the two counts is enough."
)


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """A printed row: parameters in millions, MACs in billions, accuracies in percent."""

    table: Literal[1, 2]
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
        """The overrides that configure the row's model with its HTM and VTM."""
        return [f"model={self.model}", f"augmentation=[{','.join(self.stack)}]", *self.overrides]


class Counts(NamedTuple):
    """Parameters of a model, and its MACs for one image with and without attention's matmuls."""

    parameters: int
    macs: int
    macs_without_attention: int


class RowStats(NamedTuple):
    """A printed row and the counts of its model."""

    row: PaperRow
    image_size: int
    counts: Counts


@cache
def read_paper() -> tuple[PaperRow, ...]:
    """Returns all 29 rows in the paper's order."""
    return tuple(PaperRow(**entry) for entry in yaml.safe_load(PAPER.read_text()))


def measure(row: PaperRow, config: Config) -> RowStats:
    """Builds the row's model on the meta device and counts its parameters and MACs."""
    import torch  # here: reports use this module without torch

    from reproduction.models.build import (
        build_module,
        count_macs,
        count_parameters,
        without_weights,
    )

    with torch.device("meta"):
        module = build_module(without_weights(config.model), config.augmentation, row.classes)
    size = config.model.image_size
    return RowStats(row, size, Counts(count_parameters(module), *count_macs(module.model, size)))


def agrees(measured: float, printed: float) -> bool:
    """Whether `measured` rounds to the printed digits or lies within the tolerance."""
    digits = len(str(printed).partition(".")[2])
    return round(measured, digits) == printed or abs(measured / printed - 1) <= TOLERANCE


def differences(stats: RowStats) -> Iterator[tuple[str, str | None]]:
    """Yields each printed figure that does not agree, and the reason if it is known."""
    row, (parameters, *both_macs) = stats.row, stats.counts
    if row.parameters is not None and not agrees(parameters / 1e6, row.parameters):
        yield "parameters", row.parameters_note
    printed = row.macs
    if printed is not None and not any(agrees(macs / 1e9, printed) for macs in both_macs):
        yield "MACs", row.macs_note


def verdict(stats: RowStats) -> str:
    """Says whether the printed figures match the model, and why if not."""
    row = stats.row
    if mismatches := list(differences(stats)):
        reasons = (f"{figure}, {note or 'for no known reason'}" for figure, note in mismatches)
        return f"differs: {'; '.join(reasons)}"
    if row.parameters is None and row.macs is None:
        return "nothing printed"
    if row.macs is not None and not agrees(stats.counts.macs / 1e9, row.macs):
        return "matches, MACs by conv + linear"
    return "matches"


def as_table(all_stats: list[RowStats]) -> Table:
    table = Table(caption=CAPTION, caption_justify="left")
    for column in COLUMNS:
        is_text = column in ("row", "model", "verdict")
        table.add_column(column, justify="left" if is_text else "right")
    for stats in all_stats:
        row, (parameters, *both_macs) = stats.row, stats.counts
        printed = ["-" if x is None else str(x) for x in (row.parameters, row.macs)]
        table.add_row(
            *(str(row.table), row.row, row.model, str(stats.image_size), f"{row.classes:,}"),
            *(f"{parameters / 1e6:.4f}", printed[0]),
            *(f"{macs / 1e9:.4f}" for macs in both_macs),
            *(printed[1], verdict(stats)),
        )
    return table
