"""Measures sections and writes benchmark.json, its tables and its picture."""

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from reproduction.benchmark.gain import measure_gain
from reproduction.benchmark.page import check_page, markdown, put_on_page
from reproduction.benchmark.parts import measure_detectors, measure_parts
from reproduction.benchmark.picture import draw_benchmark
from reproduction.benchmark.pipeline import measure_pipeline
from reproduction.benchmark.records import (
    FILE,
    Group,
    Report,
    add_groups,
    check_machine,
    read_report,
    slower,
)
from reproduction.benchmark.scope import ON_CPU, ON_GPU, QUICK, Scope, sizes_of
from reproduction.benchmark.startup import measure_startup
from reproduction.benchmark.steps import measure_oracle, measure_steps
from reproduction.errors import PlainError, UserError
from reproduction.hardware import hardware_name
from reproduction.heap import keep_freed_memory
from reproduction.runs import check_writable
from reproduction.storage import write_text
from reproduction.training.distributed import resolve_device
from reproduction.training.train import git_revision

MARKDOWN = "benchmark.md"
LIBRARIES = ("torch", "timm", "numpy", "scipy")
Measure = Callable[[Scope, torch.device], list[dict[str, Any]]]
MEASURES: Mapping[str, Measure] = {
    "steps": measure_steps,
    "oracle": measure_oracle,
    "detectors": measure_detectors,
    "parts": measure_parts,
    "gain": measure_gain,
    "pipeline": measure_pipeline,
    "startup": measure_startup,
}
FEWER = ("pipeline", "startup")  # rounds: what is timed there takes long, or varies little


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for.

    `sizes`: MODEL:BATCH of the training steps. `compare`: an earlier benchmark.json. `page`: a
    page with marker comments that takes the tables.
    """

    sections: Sequence[str]
    device: str = "auto"
    quick: bool = False
    pairs: int | None = None
    sizes: Sequence[str] = ()
    outputs: str = "outputs"
    compare: str | None = None
    page: str | None = None


def run_benchmark(request: Request) -> tuple[Path, list[str]]:
    """(folder that was written, what got slower); each section is written as soon as it is done.

    Raises UserError before anything is measured, PlainError where a GPU's memory is too small.
    """
    device = resolve_device(request.device, 1)
    scope = _scope(request, device)
    machine = _machine(device)
    folder = Path(request.outputs, "benchmark-quick" if request.quick else "benchmark")
    check_writable(folder / FILE, f"outputs={request.outputs}")
    if (folder / FILE).exists():
        check_machine(read_report(folder / FILE), machine, str(folder / FILE))
    earlier = read_report(Path(request.compare)) if request.compare else None
    if earlier is not None:
        check_machine(earlier, machine, f"compare={request.compare}", except_for=("versions",))
    if request.page is not None:
        check_page(Path(request.page))
    if device == "cpu":
        keep_freed_memory()  # as in training; else it would begin with the first model
    measured: Report = {"machine": machine, "sections": {}}
    for name in request.sections:
        print(f"measuring {name}", flush=True)
        measured["sections"][name] = _section(name, scope, device, request.quick)
        _show(folder, add_groups(folder / FILE, machine, name, measured["sections"][name]))
    if request.page is not None:
        put_on_page(Path(request.page), (folder / MARKDOWN).read_text())
    return folder, [] if earlier is None else slower(earlier, measured)


def _scope(request: Request, device: str) -> Scope:
    scope = QUICK if request.quick else ON_GPU if device == "cuda" else ON_CPU
    if request.pairs is not None:
        if request.pairs < 1:
            raise UserError(f"pairs={request.pairs}: must be 1 or more")
        scope = dataclasses.replace(scope, pairs=request.pairs)
    if request.sizes:
        scope = dataclasses.replace(scope, steps=sizes_of(request.sizes))
    return scope


def _section(name: str, scope: Scope, device: str, quick: bool) -> list[Group]:
    """The groups, and how they were measured."""
    start, before = time.perf_counter(), os.getloadavg()[0]
    try:
        groups = MEASURES[name](scope, torch.device(device))
    except torch.OutOfMemoryError as error:
        raise PlainError(
            f"{name}: does not fit into the GPU's memory; what was before is kept"
        ) from error
    measured = {
        "rounds": scope.starts if name in FEWER else scope.pairs,
        "quick": quick,
        "load_average": [round(load, 2) for load in (before, os.getloadavg()[0])],
        "seconds": round(time.perf_counter() - start, 1),
        "git_revision": git_revision(),
    }
    return [{**group, "measured": measured} for group in groups]


def _machine(device: str) -> dict[str, Any]:
    versions = {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}
    return {
        "hardware": hardware_name(device),
        "device": device,
        "threads": torch.get_num_threads(),
        "versions": versions,
    }


def _show(folder: Path, report: Report) -> None:
    write_text(folder / MARKDOWN, markdown(report))
    draw_benchmark(folder / "benchmark.png", report)
