"""How benchmark.json is shown: tables, and their place on a page."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from reproduction.system.errors import UserError
from reproduction.system.storage import write_text
from scripts.benchmark.pipeline import appetite
from scripts.benchmark.report import GOALS, Report, figure_of, verdict


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
        if (found := figure_of(goal, report)) is not None:
            shown, judged = _number(found.value), verdict(goal, found)
            between = " to ".join(_number(end) for end in found.interval or ())
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


def check_page(path: Path, mark: str) -> None:
    """UserError unless the page has a place for the tables."""
    _page_with(path, "", mark)


def put_on_page(path: Path, text: str, mark: str) -> None:
    """Replaces what stands between `<!-- mark: begin -->` and `<!-- mark: end -->` on a page."""
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
