"""benchmark.json: results, comparison with earlier ones, goals, and tables in Markdown.

{"machine": {...}, "sections": {name: [{"title", "about", "rows", "measured": {...}}]}}, a list of
groups per section. Rows are keyed by name and hold `ms` and mostly `ratio`, each with median,
quartiles (low, high) and the confidence interval of the median.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from reproduction.system.errors import UserError, first_line
from reproduction.system.storage import write_text
from scripts.benchmark.pipeline import workers_needed

FILE = "benchmark.json"
Report = dict[str, Any]
Group = dict[str, Any]
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
            unit = " ms" if column == "ms" else " times the first row"
            change = f"{before['median']:.4g} -> {now['median']:.4g}{unit}"
            lines.append(f"slower: {title}: {row}: {change}")
    return lines


CCT_2, CCT_7 = "training step: cct_2_3x2, batch of 128", "training step: cct_7_3x1, batch of 16"
VIT_ON_GPU = "training step: vit_base_patch16_224, batch of 128"
GAIN = "gain matrix: 504 samples, 196 tokens"
GAIN_KEPT = f"{GAIN}, memory kept"


class Goal(NamedTuple):
    """A bound (`sign` is <= or >=) on `column` of a row or, without row, on a group's exponent."""

    name: str
    sign: str
    bound: float
    title: str
    row: str
    column: str = "ratio"


GOALS = (
    Goal("HTM / plain, CCT-2/3x2", "<=", 1.05, CCT_2, "HTM"),
    Goal("VTM / plain, CCT-2/3x2", "<=", 1.04, CCT_2, "VTM"),
    Goal("HTM / plain, CCT-7/3x1", "<=", 1.05, CCT_7, "HTM"),
    Goal("VTM / plain, CCT-7/3x1", "<=", 1.04, CCT_7, "VTM"),
    Goal("HTM / plain, ViT-B/16 on a GPU", "<=", 1.05, VIT_ON_GPU, "HTM"),
    Goal("gradient / attention", ">=", 30, "detectors: cct_7_3x1, batch of 128", "gradient"),
    Goal("gain matrix: repeated / ours", ">=", 10, GAIN, "by repetition"),
    Goal("gain matrix: broadcast / ours", ">=", 3, GAIN, "by broadcast"),
    Goal("gain matrix, freed memory kept: repeated / ours", ">=", 10, GAIN_KEPT, "by repetition"),
    Goal("gain matrix, freed memory kept: broadcast / ours", ">=", 3, GAIN_KEPT, "by broadcast"),
    Goal(
        "gain matrix: memory grows as b to the power of",
        "<=",
        2,
        "gain matrix: growth with samples",
        "",
        "memory",
    ),
    Goal(
        "gain matrix: memory grows as t to the power of",
        "<=",
        1,
        "gain matrix: growth with tokens",
        "",
        "memory",
    ),
    Goal(
        "plain step: oracle / ours, CCT-7/3x1",
        ">=",
        1.1,
        "oracle: cct_7_3x1, batch of 16",
        "plain, oracle",
    ),
    Goal("train.py --help [ms]", "<=", 2000, "start-up", "python train.py --help", "ms"),
    Goal("a refused command [ms]", "<=", 3000, "start-up", "python train.py recipe.epochs=0", "ms"),
)


class Figure(NamedTuple):
    """A measured value and, if it is a median of times, its 95 % confidence interval."""

    value: float
    interval: tuple[float, float] | None = None


def figure_of(goal: Goal, report: Report) -> Figure | None:
    """The measured value of a goal; None if it is not measured."""
    for group in chain.from_iterable(report["sections"].values()):
        if group["title"] == goal.title:
            if not goal.row:
                return Figure(group["exponents"][goal.column])
            spread: Any = group["rows"][goal.row][goal.column]
            return Figure(spread["median"], tuple(spread["interval"]))
    return None


def verdict(goal: Goal, figure: Figure) -> str:
    """`met` or `missed`, with `within noise` if the interval contains the bound."""
    is_met = figure.value <= goal.bound if goal.sign == "<=" else figure.value >= goal.bound
    word = "met" if is_met else "missed"
    low, high = figure.interval or (figure.value,) * 2
    return f"{word}, within noise" if low <= goal.bound <= high and low < high else word


def _spread(value: Mapping[str, float]) -> str:
    return f"{_number(value['median'])} ({_number(value['low'])} to {_number(value['high'])})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".rstrip(".")


# column of a row -> heading, formatter
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
    """The goals, then a table for each group."""
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    parts = [
        f"{machine['hardware']}, {machine['device']}, {machine['threads']} threads; {versions}. "
        "Medians, with quartiles in brackets.",
        _goals(report),
    ]
    for name, groups in report["sections"].items():
        parts += [f"### {name}"]
        parts += [f"{_group(group)}\n\n{_conditions(group['measured'])}" for group in groups]
        parts += [_group(workers_needed(report))] if name == "pipeline" else []
    return "\n\n".join(parts) + "\n"


def _conditions(measured: Mapping[str, Any]) -> str:
    before, after = measured["load_average"]
    text = f"{measured['rounds']} rounds, load average {before:.1f} before and {after:.1f} after"
    commit, *dirty = str(measured["git_revision"]).partition("-")
    return f"{text}, revision {commit[:12]}{''.join(dirty)}." + (
        " A quick try, not a measurement." if measured["quick"] else ""
    )


def _goals(report: Report) -> str:
    lines = ["| what | target | measured | 95 % confidence | |", "|---|---:|---:|---:|---|"]
    for goal in GOALS:
        value, interval, word = "not measured", "", ""
        if (figure := figure_of(goal, report)) is not None:
            value, word = _number(figure.value), verdict(goal, figure)
            interval = " to ".join(_number(end) for end in figure.interval or ())
        lines.append(
            f"| {goal.name} | {goal.sign} {goal.bound:g} | {value} | {interval} | {word} |"
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
