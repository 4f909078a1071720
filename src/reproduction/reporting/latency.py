"""Latency of the saliency detectors (Table 3): measured here, and as printed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass as checked

from reproduction.reporting.cells import FULL, Cell
from reproduction.system.errors import UserError

FILE = "latency.json"  # in the folder of all runs
PAPERS = "an RTX A6000"
REFERENCE = "attention"  # of the ratios


class Latency(NamedTuple):
    """Latency of a detector, its quartiles if known, and its ratio to the attention detector."""

    ms: float
    low_ms: float | None
    high_ms: float | None
    ratio: float | None


@checked(frozen=True)
class Timing:
    """Median and quartiles of a detector, as in the file."""

    median_ms: float = Field(gt=0)
    low_ms: float = Field(gt=0)
    high_ms: float = Field(gt=0)


@checked(frozen=True)
class Measurement:
    """The content of the file: conditions, and the timing of each detector."""

    hardware: str
    device: str
    precision: str
    batch_size: int
    model: str
    repeats: int
    torch: str
    detectors: Mapping[str, Timing]

    @property
    def conditions(self) -> str:
        return (
            f"{self.hardware}, {self.model}, batch of {self.batch_size}, {self.precision}, "
            f"torch {self.torch}"
        )

    def latencies(self) -> dict[str, Latency]:
        reference = self.detectors.get(REFERENCE)
        unit = None if reference is None else reference.median_ms
        return {
            name: Latency(x.median_ms, x.low_ms, x.high_ms, unit and x.median_ms / unit)
            for name, x in self.detectors.items()
        }


def command(scale: str) -> str:
    """Returns the command that measures the detectors."""
    return "python scripts/measure_latency.py" + ("" if scale == FULL else f" --scale {scale}")


def read_latency(outputs: Path) -> Measurement | None:
    """Reads the file beside the runs, if it exists; UserError if it is damaged."""
    path = outputs / FILE
    if not path.exists():
        return None
    try:
        return TypeAdapter(Measurement).validate_json(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}; remove it") from error


def printed_latencies(cells: Sequence[Cell]) -> dict[str, Latency]:
    """Returns the printed latencies by row."""
    known = {cell.row: cell.latency_ms for cell in cells if cell.latency_ms is not None}
    return {row: Latency(ms, None, None, ms / known[REFERENCE]) for row, ms in known.items()}


def in_ms(ms: float) -> str:
    """Formats with three significant digits, or without decimals from 100 ms on."""
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def flat_latency(name: str, latency: Latency | None) -> dict[str, float | None]:
    """Returns the values by the names of their columns in files."""
    return {f"{name}_{key}": latency and getattr(latency, key) for key in Latency._fields}
