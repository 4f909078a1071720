"""Latency of the saliency detectors (Table 3): the measurement beside the runs, and as printed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass as checked

from reproduction.studies.study import FULL, Study
from reproduction.system.errors import UserError

LATENCY_FILE = "latency.json"  # in the folder of all runs
PAPERS = "an RTX A6000"
REFERENCE = "attention"  # of the ratios


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


def read_latency(outputs: Path) -> Measurement | None:
    """Reads the file beside the runs, if it exists; UserError if it is damaged."""
    path = outputs / LATENCY_FILE
    if not path.exists():
        return None
    try:
        return TypeAdapter(Measurement).validate_json(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}; remove it") from error


def latency_row(measured: Measurement | None, name: str, study: Study) -> dict[str, Any]:
    """Returns the columns of a detector: median, quartiles and ratio, measured and printed."""
    rows = study.rows.values()
    printed = {x.row: x.printed["latency_ms"] for x in rows if "latency_ms" in x.printed}
    timings = {} if measured is None else measured.detectors
    own, unit = timings.get(name), timings.get(REFERENCE)
    return {
        "latency_ms": own and own.median_ms,
        "latency_low_ms": own and own.low_ms,
        "latency_high_ms": own and own.high_ms,
        "latency_ratio": own and unit and own.median_ms / unit.median_ms,
        "paper_latency_ms": printed[name],
        "paper_latency_ratio": printed[name] / printed[REFERENCE],
    }


def note(measured: Measurement | None, scale: str) -> str:
    """Says under which conditions the latencies were measured, or how to measure them."""
    if measured is None:
        flag = "" if scale == FULL else f" --scale {scale}"
        command = f"python -m scripts.benchmark.latency{flag}"
        return f"Latency is not measured here yet; {command} measures it."
    compared = "only the ratios compare" if scale == FULL else "nothing compares: other models"
    return (
        f"Latency: median of {measured.repeats} repeats in ms, and its ratio to attention. Ours: "
        f"{measured.hardware}, {measured.model}, batch of {measured.batch_size}, "
        f"{measured.precision}, torch {measured.torch}. The paper's: {PAPERS}, so {compared}."
    )
