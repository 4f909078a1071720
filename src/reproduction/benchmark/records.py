"""benchmark.json: what was measured, on what, and what got slower since. Imports no torch.

{"machine": {...}, "sections": {name: [{"title", "about", "rows", "measured": {...}}]}}, by groups.
Rows are keyed by name and hold `ms` and mostly `ratio`, each with median, quartiles (low, high)
and the interval of the median.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reproduction.errors import UserError, first_line
from reproduction.storage import write_text

FILE = "benchmark.json"
Report = dict[str, Any]
Group = dict[str, Any]
Key = tuple[str, str, str]  # title of a group, row, column


def read_report(path: Path) -> Report:
    """UserError if it is none."""
    try:
        report = json.loads(path.read_text())
        _ = {**report["machine"]}, [*spreads(report)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: is no benchmark.json: {first_line(error)}") from error
    return report


def add_groups(path: Path, machine: dict[str, Any], section: str, groups: list[Group]) -> Report:
    """Puts groups into the file; keeps those of other titles. UserError: of another machine."""
    report: Report = {"machine": machine, "sections": {}}
    if path.exists():
        report = read_report(path)
        check_machine(report, machine, str(path))
    new = {group["title"]: group for group in groups}
    kept = {group["title"]: group for group in report["sections"].get(section, [])}
    report["sections"][section] = [*(kept | new).values()]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(report, indent=2) + "\n")
    return report


def check_machine(
    report: Report, machine: dict[str, Any], where: str, except_for: Sequence[str] = ()
) -> None:
    """UserError unless the report is of this machine and of the same library versions."""
    for what, value in machine.items():
        before = report["machine"].get(what)
        if before != value and what not in except_for:
            raise UserError(f"{where}: measured with {what} {before}, this is {value}")


def spreads(report: Report) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Every time and ratio."""
    for groups in report["sections"].values():
        for group in groups:
            for name, row in group["rows"].items():
                for column in ("ms", "ratio"):
                    if column in row:
                        yield (group["title"], name, column), row[column]


def slower(old: Report, new: Report) -> list[str]:
    """What got slower beyond the noise: the medians' intervals do not overlap.

    UserError if the two have no figure in common.
    """
    before, now = dict(spreads(old)), dict(spreads(new))
    if not (common := before.keys() & now.keys()):
        raise UserError("compare: the earlier run has none of what was measured")
    lines = []
    for key in (key for key in now if key in common):
        then, here = before[key], now[key]
        if here["interval"][0] > then["interval"][1]:
            title, row, column = key
            unit = " ms" if column == "ms" else " times the first row"
            change = f"{then['median']:.4g} -> {here['median']:.4g}{unit}"
            lines.append(f"slower: {title}: {row}: {change}")
    return lines
