"""Parameters and MACs of the models of Tables 1 and 2 beside the printed figures."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.table import Table

from reproduction.config import Config
from reproduction.models.build import (
    Macs,
    build_module,
    count_macs,
    count_parameters,
    without_start,
)
from reproduction.reporting.paper import PaperRow

TOLERANCE = 0.005
COLUMNS = (
    *("table", "row", "model", "pixels", "classes", "params (M)", "paper (M)"),
    *("MACs (G)", "conv + linear", "paper (G)", "verdict"),
)
CAPTION = (
    "MACs: one image in evaluation, half the FLOPs of torch's FlopCounterMode (convolutions, "
    "linear layers, attention matmuls); conv + linear: without the matmuls of attention. "
    f"matches: rounds to the printed digits, or lies within {TOLERANCE:.1%}; of the two counts "
    "of MACs one must."
)


@dataclass(frozen=True)
class RowStats:
    """What a row's model measures."""

    row: PaperRow
    image_size: int
    parameters: int
    macs: Macs


def measure(row: PaperRow, config: Config) -> RowStats:
    """Builds the row's model without memory for its weights, and counts."""
    with torch.device("meta"):
        module = build_module(without_start(config.model), config.augmentation, row.classes)
    size = config.model.image_size
    return RowStats(row, size, count_parameters(module), count_macs(module.model, size))


def agrees(measured: float, printed: float) -> bool:
    """Whether `measured` rounds to the printed digits or lies within the tolerance."""
    digits = len(str(printed).partition(".")[2])
    return round(measured, digits) == printed or abs(measured / printed - 1) <= TOLERANCE


def differences(stats: RowStats) -> Iterator[tuple[str, str | None]]:
    """(printed figure that does not agree, why as far as known)."""
    row = stats.row
    if row.parameters is not None and not agrees(stats.parameters / 1e6, row.parameters):
        yield "parameters", row.parameters_note
    macs = row.macs
    if macs is not None and not any(agrees(count / 1e9, macs) for count in stats.macs):
        yield "MACs", row.macs_note


def verdict(stats: RowStats) -> str:
    """Whether the row's printed figures are its model's, and why not."""
    row = stats.row
    if found := list(differences(stats)):
        reasons = (f"{figure}, {note or 'for no known reason'}" for figure, note in found)
        return f"differs: {'; '.join(reasons)}"
    if row.parameters is None and row.macs is None:
        return "nothing printed"
    if row.macs is not None and not agrees(stats.macs.total / 1e9, row.macs):
        return "matches, MACs by conv + linear"
    return "matches"


def as_table(all_stats: list[RowStats]) -> Table:
    """The table for a terminal."""
    table = Table(caption=CAPTION, caption_justify="left")
    for column in COLUMNS:
        is_text = column in ("row", "model", "verdict")
        table.add_column(column, justify="left" if is_text else "right")
    for stats in all_stats:
        table.add_row(*_cells(stats))
    return table


def as_markdown(all_stats: list[RowStats]) -> str:
    """The table as a Markdown page."""
    rules = ["---"] * len(COLUMNS)
    rows = [COLUMNS, rules, *(_cells(stats) for stats in all_stats)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", CAPTION]) + "\n"


def _cells(stats: RowStats) -> list[str]:
    row = stats.row
    return [
        *(str(row.table), row.row, row.model, str(stats.image_size), f"{row.classes:,}"),
        *(f"{stats.parameters / 1e6:.4f}", _printed(row.parameters)),
        *(f"{count / 1e9:.4f}" for count in stats.macs),
        *(_printed(row.macs), verdict(stats)),
    ]


def _printed(figure: float | None) -> str:
    return "-" if figure is None else str(figure)
