"""What training steps consume beside what a worker loads, both as measured. Imports no torch."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from reproduction.benchmark.records import Report
from reproduction.benchmark.scope import CCT, VIT

SMALL = "CIFAR, held in memory, to 32 px"
FILES = "JPEG of 500 x 375, to 224 px"
PHOTOS = "500 x 375, held in memory, to 224 px"
FEEDS = {SMALL: CCT, FILES: VIT, PHOTOS: VIT}  # images -> model that trains on such
Row = dict[str, float | None]


def appetite(report: Report) -> dict[str, Any]:
    """A group of rows for every kind of images: images/s of a plain step, workers that feed it.

    None where a step is not measured, as a GPU's in the report of a CPU.
    """
    (pipeline,) = report["sections"]["pipeline"]
    rows: dict[str, Row] = {}
    for images, model in FEEDS.items():
        loaded = pipeline["rows"][images]["images_per_second"]
        for step, consumed in _steps(report, model):
            workers = None if consumed is None else math.ceil(consumed / loaded)
            rows[f"{step}: {images}"] = {"images_per_second": consumed, "workers": workers}
    about = "images/s of plain training steps in this report, and the workers that load as many"
    return {"title": "data-loading workers needed", "about": about, "rows": rows}


def _steps(report: Report, model: str) -> Iterator[tuple[str, float | None]]:
    """(what, images/s) of the model's plain steps on this device, and of a GPU if it is none."""
    groups: list[Mapping[str, Any]] = report["sections"].get("steps", [])
    device = report["machine"]["device"]
    found = [group for group in groups if group["title"].startswith(f"training step: {model},")]
    for group in found:
        what = group["title"].removeprefix("training step: ")
        yield f"{what}, {device}", group["rows"]["plain"]["images_per_second"]
    if not found:
        yield f"{model}, {device}", None
    if device != "cuda":
        yield f"{model}, cuda", None
