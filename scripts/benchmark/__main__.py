"""Measures what HTM and VTM add to a training step on this machine."""

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from reproduction.runs.folder import check_writable
from reproduction.system.errors import UserError, first_line
from reproduction.system.hardware import hardware_name, keep_freed_memory
from reproduction.system.storage import write_text
from reproduction.system.terminal import Parser, one_line_errors, positive, say
from reproduction.training.distributed import resolve_device
from reproduction.training.train import git_revision
from scripts.benchmark.steps import COMPILING, EAGER, Group, measure_steps
from scripts.benchmark.trainers import CCT, TRAINED_AS, VIT

BENCHMARK_FILE = "benchmark.json"
TIMED_LIBRARIES = ("torch", "timm", "numpy", "scipy")
BATCH_OF_MODEL = {  # model and batch
    "cpu": (f"cct_2_3x2:128 {CCT}:16 {VIT}:4").split(),
    "cuda": (f"cct_2_3x2:128 {CCT}:128 {VIT}:128").split(),
}
Report = dict[str, Any]  # machine, revision, rounds, load_average, groups
Key = tuple[str, str, str]  # title of a group, row, column


@one_line_errors("benchmark")
def main() -> None:
    """Checks the arguments, then measures; writes each size as soon as it is done."""
    parser = Parser(prog="benchmark", description=__doc__)
    parser.add_argument("--pairs", type=positive, default=40, help="rounds (default: 40)")
    parser.add_argument("--sizes", nargs="+", metavar="MODEL:BATCH", help="what to train")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--compare", metavar="OLD.json", help="print what got slower since")
    parser.add_argument("--outputs", default="outputs", help="folder of all runs")
    args = parser.parse_args()
    device = resolve_device(args.device, 1)
    sizes = [parse_size(text) for text in args.sizes or BATCH_OF_MODEL[device]]
    path = Path(args.outputs, "benchmark", BENCHMARK_FILE)
    check_writable(path, f"outputs={args.outputs}")
    before = os.getloadavg()[0]
    report: Report = {
        "machine": machine_of(device),
        "revision": git_revision(),
        "rounds": args.pairs,
        "groups": [],
    }
    earlier = read_report(Path(args.compare), report) if args.compare else None
    if device == "cpu":
        keep_freed_memory()  # as in training, but before the first model
    path.parent.mkdir(parents=True, exist_ok=True)
    for model, batch_size in sizes:
        say(f"measuring {model}, batch of {batch_size}")
        compiling = COMPILING if device == "cuda" else (EAGER,)
        groups = measure_steps(model, batch_size, torch.device(device), compiling)
        *_, group = islice(groups, args.pairs)
        report["groups"].append(group)
        report["load_average"] = [before, os.getloadavg()[0]]
        write_text(path, json.dumps(report, indent=2) + "\n")
    say(f"\n{markdown(report)}\nwritten to {path}")
    if earlier is not None:
        say("\n".join(slower(earlier, report)) or f"nothing got slower than in {args.compare}")


def parse_size(text: str) -> tuple[str, int]:
    """Parses MODEL:BATCH; UserError for an unknown model or a batch below 2."""
    model, _, batch = text.partition(":")
    if model not in TRAINED_AS:
        raise UserError(f"sizes={text}: the model must be one of {', '.join(TRAINED_AS)}")
    if not batch.isdecimal() or int(batch) < 2:
        raise UserError(f"sizes={text}: must be MODEL:BATCH, with a batch of 2 or more")
    return model, int(batch)


def machine_of(device: str) -> dict[str, Any]:
    versions = {"python": platform.python_version()} | {
        name: version(name) for name in TIMED_LIBRARIES
    }
    return {
        "hardware": hardware_name(device),
        "device": device,
        "threads": torch.get_num_threads(),
        "versions": versions,
    }


def read_report(path: Path, new: Report) -> Report:
    """Reads an earlier report; UserError if it is none, or of another machine than the new one.

    Versions of libraries may differ: what they change is a reason to compare.
    """
    try:
        report = json.loads(path.read_text())
        machine, _ = {**report["machine"]}, [*spreads(report)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"compare={path}: is no {BENCHMARK_FILE}: {first_line(error)}") from error
    for key, value in new["machine"].items():
        if key != "versions" and machine.get(key) != value:
            raise UserError(
                f"compare={path}: measured with {key} {machine.get(key)}, this is {value}"
            )
    return report


def spreads(report: Report) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Yields every time and ratio."""
    for group in report["groups"]:
        for name, row in group["rows"].items():
            for column in ("ms", "ratio"):
                if column in row:
                    yield (group["title"], name, column), row[column]


def slower(old: Report, new: Report) -> list[str]:
    """Slowdowns beyond the noise: the confidence intervals of the medians do not overlap.

    Raises UserError if the reports have no figure in common.
    """
    old_spreads, new_spreads = dict(spreads(old)), dict(spreads(new))
    common = [key for key in new_spreads if key in old_spreads]
    if not common:
        raise UserError("compare: the earlier run has none of the measured figures")
    lines = []
    for title, row, column in common:
        before, now = old_spreads[title, row, column], new_spreads[title, row, column]
        if now["interval"][0] > before["interval"][1]:
            unit = " ms" if column == "ms" else " times plain"
            change = f"{before['median']:.4g} -> {now['median']:.4g}{unit}"
            lines.append(f"slower: {title}: {row}: {change}")
    return lines


def _spread(value: Mapping[str, float]) -> str:
    return f"{_number(value['median'])} ({_number(value['low'])} to {_number(value['high'])})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".rstrip(".")


# column of a row -> heading, formatter
PRINTED_COLUMNS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "ms": ("ms", _spread),
    "ratio": ("to plain", _spread),
    "images_per_second": ("images/s", _number),
    "peak_mib": ("peak memory [MiB]", _number),
    "mixed_samples": ("mixed samples", lambda number: f"{number:.0f}"),
    "mixed_tokens": ("tokens replaced in each", lambda number: f"{number:.1f}"),
}


def markdown(report: Report) -> str:
    """The machine, then a table for each size."""
    machine, (before, after) = report["machine"], report["load_average"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    commit, *dirty = str(report["revision"]).partition("-")
    head = (
        f"{machine['hardware']}, {machine['device']}, {machine['threads']} threads; {versions}. "
        f"{report['rounds']} rounds, load average {before:.1f} before and {after:.1f} after, "
        f"revision {commit[:12]}{''.join(dirty)}. Medians, with quartiles in brackets."
    )
    return "\n\n".join([head, *map(table, report["groups"])]) + "\n"


def table(group: Group) -> str:
    """A group as a Markdown table, and what is left out of it."""
    rows = group["rows"]
    shown = [name for name in PRINTED_COLUMNS if any(name in row for row in rows.values())]
    lines = [f"**{group['title']}** ({group['about']})", ""]
    lines.append(_line(["", *(PRINTED_COLUMNS[name][0] for name in shown)]))
    lines.append("|---|" + "---:|" * len(shown))
    for name, row in rows.items():
        cells = (
            PRINTED_COLUMNS[column][1](row[column]) if column in row else "" for column in shown
        )
        lines.append(_line([name, *cells]))
    lines += [f"\nNot timed: {name}: {why}" for name, why in group["left_out"].items()]
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
