"""Benchmarks steps, detectors, parts of HTM, gain matrix, attention, loading and start-up."""

import argparse
import dataclasses
import os
import platform
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from reproduction.runs.folder import check_writable
from reproduction.system.errors import PlainError, UserError
from reproduction.system.hardware import hardware_name, keep_freed_memory
from reproduction.system.storage import write_text
from reproduction.system.terminal import one_line_errors
from reproduction.training.distributed import resolve_device
from reproduction.training.train import git_revision
from scripts.benchmark.latency import measure_detectors, measure_gain, measure_parts
from scripts.benchmark.measure import ON_CPU, ON_GPU, QUICK, Group, Scope, parse_sizes
from scripts.benchmark.pipeline import measure_attention, measure_pipeline, measure_startup
from scripts.benchmark.report import (
    FILE,
    Report,
    add_groups,
    check_machine,
    check_page,
    markdown,
    put_on_page,
    read_report,
    slower,
)
from scripts.benchmark.steps import measure_batches, measure_oracle, measure_steps

MARKDOWN, MARK = "benchmark.md", "benchmark"
LIBRARIES = ("torch", "timm", "numpy", "scipy")
SECTIONS: Mapping[str, Callable[[Scope, torch.device], list[Group]]] = {
    "steps": measure_steps,
    "batches": measure_batches,
    "oracle": measure_oracle,
    "detectors": measure_detectors,
    "parts": measure_parts,
    "gain": measure_gain,
    "attention": measure_attention,
    "pipeline": measure_pipeline,
    "startup": measure_startup,
}
FEWER_ROUNDS = ("batches", "attention", "pipeline", "startup")  # slow, or with little variation


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="benchmark", description=__doc__, usage=argparse.SUPPRESS
    )
    options.add_argument("--sections", nargs="+", choices=SECTIONS, default=[*SECTIONS])
    options.add_argument("--pairs", type=int, help="interleaved rounds (default: 40)")
    options.add_argument(
        "--sizes", nargs="+", default=(), metavar="MODEL:BATCH", help="training steps to time"
    )
    options.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options.add_argument("--quick", action="store_true", help="tiny sizes, for a test")
    options.add_argument("--compare", metavar="OLD.json", help="print what got slower since")
    options.add_argument("--page", metavar="FILE.md", help="put the tables on this page as well")
    options.add_argument("--outputs", default="outputs", help="folder of all runs")
    return options


@one_line_errors("benchmark")
def main() -> None:
    """Checks the arguments, then measures; writes each section as soon as it is done."""
    args = parser().parse_args()
    device = resolve_device(args.device, 1)
    scope = _scope(args, device)
    machine = _machine(device)
    folder = Path(args.outputs, "benchmark-quick" if args.quick else "benchmark")
    path, page = folder / FILE, folder / MARKDOWN
    check_writable(path, f"outputs={args.outputs}")
    if path.exists():
        check_machine(read_report(path), machine, str(path))
    earlier = read_report(Path(args.compare)) if args.compare else None
    if earlier is not None:
        check_machine(earlier, machine, f"compare={args.compare}", except_for=("versions",))
    if args.page is not None:
        check_page(Path(args.page), MARK)
    if device == "cpu":
        keep_freed_memory()  # as in training, but before the first model
    measured: Report = {"machine": machine, "sections": {}}
    for name in args.sections:
        print(f"measuring {name}", flush=True)
        measured["sections"][name] = _section(name, scope, device, args.quick)
        report = add_groups(path, machine, name, measured["sections"][name])
        write_text(page, markdown(report))
    if args.page is not None:
        put_on_page(Path(args.page), page.read_text(), MARK)
    slowdowns = [] if earlier is None else slower(earlier, measured)
    print(page.read_text())
    print(f"written to {folder}")
    if args.compare:
        print("\n".join(slowdowns) or f"nothing got slower than in {args.compare}")


def _scope(args: argparse.Namespace, device: str) -> Scope:
    scope = QUICK if args.quick else ON_GPU if device == "cuda" else ON_CPU
    if args.pairs is not None:
        if args.pairs < 1:
            raise UserError(f"pairs={args.pairs}: must be 1 or more")
        scope = dataclasses.replace(scope, pairs=args.pairs)
    if args.sizes:
        scope = dataclasses.replace(scope, steps=parse_sizes(args.sizes))
    return scope


def _machine(device: str) -> dict[str, Any]:
    versions = {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}
    return {
        "hardware": hardware_name(device),
        "device": device,
        "threads": torch.get_num_threads(),
        "versions": versions,
    }


def _section(name: str, scope: Scope, device: str, quick: bool) -> list[Group]:
    """The groups of a section and their conditions; PlainError if a GPU's memory is too small."""
    start, before = time.perf_counter(), os.getloadavg()[0]
    try:
        groups = SECTIONS[name](scope, torch.device(device))
    except torch.OutOfMemoryError as error:
        raise PlainError(
            f"{name}: does not fit into the GPU's memory; earlier results are kept"
        ) from error
    measured = {
        "rounds": scope.few if name in FEWER_ROUNDS else scope.pairs,
        "quick": quick,
        "load_average": [round(load, 2) for load in (before, os.getloadavg()[0])],
        "seconds": round(time.perf_counter() - start, 1),
        "git_revision": git_revision(),
    }
    return [{**group, "measured": measured} for group in groups]


if __name__ == "__main__":
    main()
