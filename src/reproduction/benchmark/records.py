"""benchmark.json: what was measured, on what, and what got slower since. Imports no torch.

{"machine": {...}, "sections": {name: [{"title", "about", "rows", "measured": {...}}]}}, by groups.
Rows are keyed by name and hold `ms` and mostly `ratio`, each with median, low and high.
"""

import json
from collections.abc import Iterator
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
        for _ in spreads(report):
            pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: is no benchmark.json: {first_line(error)}") from error
    return report


def add_groups(path: Path, machine: dict[str, Any], section: str, groups: list[Group]) -> Report:
    """Puts groups into the file; keeps those of other titles if they are of the same machine."""
    report: Report = {"machine": machine, "sections": {}}
    if path.exists():
        earlier = read_report(path)
        report = earlier if earlier["machine"] == machine else report
    new = {group["title"]: group for group in groups}
    kept = {group["title"]: group for group in report["sections"].get(section, [])}
    report["sections"][section] = [*(kept | new).values()]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(report, indent=2) + "\n")
    return report


def spreads(report: Report) -> Iterator[tuple[Key, dict[str, float]]]:
    """Every time and ratio."""
    for groups in report["sections"].values():
        for group in groups:
            for name, row in group["rows"].items():
                for column in ("ms", "ratio"):
                    if column in row:
                        yield (group["title"], name, column), row[column]


def slower(old: Report, new: Report) -> list[str]:
    """What got slower beyond the spread of both: the quartiles do not overlap.

    UserError if they are of different machines.
    """
    for what, value in new["machine"].items():
        if (before := old["machine"].get(what)) != value and what != "versions":
            raise UserError(f"compare: measured with {what} {before}, this is {value}")
    before, lines = dict(spreads(old)), []
    for key, now in spreads(new):
        then = before.get(key)
        if then is not None and now["low"] > then["high"]:
            title, row, column = key
            unit = " ms" if column == "ms" else " times the first row"
            change = f"{then['median']:.4g} -> {now['median']:.4g}{unit}"
            lines.append(f"slower: {title}: {row}: {change}")
    return lines
