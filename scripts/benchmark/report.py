"""benchmark.json: results, comparison with earlier ones, and tables in Markdown.

{"machine": {...}, "sections": {name: [{"title", "about", "rows", "measured": {...}}]}}, a list of
groups per section. Rows are keyed by name and hold `ms` and mostly `ratio`, each with median,
quartiles (low, high) and the confidence interval of the median.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reproduction.system.errors import UserError, first_line
from reproduction.system.storage import write_text
from scripts.benchmark.measure import Group

FILE = "benchmark.json"
Report = dict[str, Any]
Key = tuple[str, str, str]  # title of a group, row, column


def read_report(path: Path) -> Report:
    """Reads benchmark.json; UserError if it cannot be read as such."""
    try:
        report = json.loads(path.read_text())
        _ = {**report["machine"]}, [*spreads(report)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: is no benchmark.json: {first_line(error)}") from error
    return report


def add_groups(path: Path, machine: dict[str, Any], section: str, groups: list[Group]) -> Report:
    """Adds groups to the file, replacing those of the same title; UserError on another machine."""
    report: Report = {"machine": machine, "sections": {}}
    if path.exists():
        report = read_report(path)
        check_machine(report, machine, str(path))
    new = {group["title"]: group for group in groups}
    old = {group["title"]: group for group in report["sections"].get(section, [])}
    report["sections"][section] = [*(old | new).values()]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(report, indent=2) + "\n")
    return report


def check_machine(
    report: Report, machine: dict[str, Any], where: str, except_for: Sequence[str] = ()
) -> None:
    """Raises UserError unless the report is of this machine and the same library versions."""
    for key, value in machine.items():
        old = report["machine"].get(key)
        if old != value and key not in except_for:
            raise UserError(f"{where}: measured with {key} {old}, this is {value}")


def spreads(report: Report) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Yields every time and ratio."""
    for groups in report["sections"].values():
        for group in groups:
            for name, row in group["rows"].items():
                for column in ("ms", "ratio"):
                    if row.get(column) is not None:
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
            unit = " ms" if column == "ms" else " times the first row"
            change = f"{before['median']:.4g} -> {now['median']:.4g}{unit}"
            lines.append(f"slower: {title}: {row}: {change}")
    return lines


def _spread(value: Mapping[str, float]) -> str:
    return f"{_number(value['median'])} ({_number(value['low'])} to {_number(value['high'])})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".rstrip(".")


def _percent(share: float) -> str:
    return f"{share:.1%}"


# column of a row -> heading, formatter
COLUMNS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "ms": ("ms", _spread),
    "ratio": ("ratio to the first two rows", _spread),
    "images_per_second": ("images/s", _number),
    "share_of_rate": ("share of the matrix rate", _percent),
    "matching": ("host in the matching", _percent),
    "gpu_busy": ("GPU busy", _percent),
    "peak_mib": ("peak memory [MiB]", _number),
    "mixed_samples": ("mixed samples", lambda number: f"{number:.0f}"),
    "mixed_tokens": ("tokens replaced in each", lambda number: f"{number:.1f}"),
}


def markdown(report: Report) -> str:
    """The machine, then a table for each group."""
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    parts = [
        f"{machine['hardware']}, {machine['device']}, {machine['threads']} threads; {versions}. "
        "Medians, with quartiles in brackets.",
    ]
    for name, groups in report["sections"].items():
        parts += [f"### {name}"]
        parts += [f"{_group(group)}\n\n{_conditions(group['measured'])}" for group in groups]
    return "\n\n".join(parts) + "\n"


def _conditions(measured: Mapping[str, Any]) -> str:
    before, after = measured["load_average"]
    text = f"{measured['rounds']} rounds, load average {before:.1f} before and {after:.1f} after"
    commit, *dirty = str(measured["git_revision"]).partition("-")
    return f"{text}, revision {commit[:12]}{''.join(dirty)}." + (
        " A quick try, not a measurement." if measured["quick"] else ""
    )


def _group(group: Mapping[str, Any]) -> str:
    rows: Mapping[str, Any] = group["rows"]
    shown = [name for name in COLUMNS if any(name in row for row in rows.values())]
    lines = [f"**{group['title']}** ({group['about']})"]
    if rows:
        lines += ["", _line(["", *(COLUMNS[name][0] for name in shown)])]
        lines += ["|---|" + "---:|" * len(shown)]
    for name, row in rows.items():
        lines.append(_line([name, *(_cell(row, column) for column in shown)]))
    return "\n".join(lines)


def _cell(row: Mapping[str, Any], column: str) -> str:
    if column not in row:
        return ""
    return "not measured" if row[column] is None else COLUMNS[column][1](row[column])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def check_page(path: Path, mark: str) -> None:
    """Raises UserError unless the page has the marks between which the tables go."""
    _page_with(path, "", mark)


def put_on_page(path: Path, text: str, mark: str) -> None:
    """Replaces the text between `<!-- mark: begin -->` and `<!-- mark: end -->` on a page."""
    write_text(path, _page_with(path, text, mark))


def _page_with(path: Path, text: str, mark: str) -> str:
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    try:
        before, has_begin, rest = path.read_text().partition(begin)
    except OSError as error:
        raise UserError(f"page={path}: {error.strerror}") from error
    _, has_end, after = rest.partition(end)
    if not (has_begin and has_end):
        raise UserError(f"page={path}: has no {begin} and {end}")
    return f"{before}{begin}\n{text}{end}{after}"
