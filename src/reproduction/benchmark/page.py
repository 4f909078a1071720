"""The Markdown of benchmark.json, and its place on a page. Imports no torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from reproduction.benchmark.appetite import appetite
from reproduction.benchmark.goals import GOALS, figure_of, verdict
from reproduction.benchmark.records import Report
from reproduction.errors import UserError
from reproduction.storage import write_text

BEGIN, END = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"


def _spread(value: Mapping[str, float]) -> str:
    return f"{_number(value['median'])} ({_number(value['low'])} to {_number(value['high'])})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".rstrip(".")


# column of a row -> heading, how it is written
COLUMNS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "ms": ("ms", _spread),
    "ratio": ("ratio to the first two rows", _spread),
    "images_per_second": ("images/s", _number),
    "workers": ("workers needed", lambda number: f"{number:.0f}"),
    "share_of_rate": ("share of the matrix rate", lambda share: f"{share:.1%}"),
    "peak_mib": ("peak memory [MiB]", _number),
    "mixed_samples": ("mixed samples", lambda number: f"{number:.0f}"),
    "mixed_tokens": ("tokens replaced in each", lambda number: f"{number:.1f}"),
    "assignment_ms": ("assignment [ms]", _number),
}


def markdown(report: Report) -> str:
    """Goals, then a table for each group."""
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    parts = [
        f"{machine['hardware']}, {machine['device']}, {machine['threads']} threads; {versions}. "
        "Medians, with quartiles in brackets.",
        _goals(report),
    ]
    for name, groups in report["sections"].items():
        parts += [f"### {name}"]
        parts += [f"{_group(group)}\n\n{_measured(group['measured'])}" for group in groups]
        parts += [_group(appetite(report))] if name == "pipeline" else []
    return "\n\n".join(parts) + "\n"


def _measured(how: Mapping[str, Any]) -> str:
    before, after = how["load_average"]
    text = f"{how['rounds']} rounds, load average {before:.1f} before and {after:.1f} after"
    commit, *dirty = str(how["git_revision"]).partition("-")
    return f"{text}, revision {commit[:12]}{''.join(dirty)}." + (
        " A quick try, not a measurement." if how["quick"] else ""
    )


def _goals(report: Report) -> str:
    lines = ["| what | target | measured | 95 % confidence | |", "|---|---:|---:|---:|---|"]
    for goal in GOALS:
        shown, between, judged = "not measured", "", ""
        if (figure := figure_of(goal, report)) is not None:
            shown, judged = _number(figure.value), verdict(goal, figure)
            between = " to ".join(_number(end) for end in figure.interval or ())
        lines.append(
            f"| {goal.what} | {goal.sign} {goal.bound:g} | {shown} | {between} | {judged} |"
        )
    return "\n".join(lines)


def _group(group: Mapping[str, Any]) -> str:
    rows: Mapping[str, Any] = group["rows"]
    shown = [name for name in COLUMNS if any(name in row for row in rows.values())]
    head = ["", *(COLUMNS[name][0] for name in shown)]
    lines = [f"**{group['title']}** ({group['about']})", "", _line(head)]
    lines.append("|---|" + "---:|" * len(shown))
    for name, row in rows.items():
        lines.append(_line([name, *(_cell(row, column) for column in shown)]))
    return "\n".join(lines)


def _cell(row: Mapping[str, Any], column: str) -> str:
    if column not in row:
        return ""
    return "not measured" if row[column] is None else COLUMNS[column][1](row[column])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def check_page(path: Path, marks: tuple[str, str] = (BEGIN, END)) -> None:
    """UserError unless the page has a place for the tables."""
    _around(path, *marks)


def put_on_page(path: Path, text: str, marks: tuple[str, str] = (BEGIN, END)) -> None:
    """Replaces what stands between the two marker comments of a page."""
    before, after = _around(path, *marks)
    write_text(path, f"{before}{marks[0]}\n{text}{marks[1]}{after}")


def _around(path: Path, begin: str, end: str) -> tuple[str, str]:
    try:
        before, has_begin, rest = path.read_text().partition(begin)
    except OSError as error:
        raise UserError(f"page={path}: {error.strerror}") from error
    _, has_end, after = rest.partition(end)
    if not (has_begin and has_end):
        raise UserError(f"page={path}: has no {begin} and {end}")
    return before, after
