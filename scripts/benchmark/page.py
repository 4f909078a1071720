"""How benchmark.json is shown: tables, their place on a page, and a picture."""

from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from reproduction.reporting.figures import BLUE, GREEN, GREY, ORANGE, figure
from reproduction.system.errors import UserError
from reproduction.system.storage import write_text
from scripts.benchmark.measure import AGAIN
from scripts.benchmark.pipeline import appetite
from scripts.benchmark.report import GOALS, Report, figure_of, verdict

WIDE = 4  # ratios that differ more are drawn on a logarithmic scale


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


def draw_benchmark(path: Path, report: Report) -> None:
    """One panel for each of what there is; writes a .png and a .pdf."""
    groups = [*chain.from_iterable(report["sections"].values())]
    panels = [
        *(group for group in groups if any("ratio" in row for row in group["rows"].values())),
        *(group for group in groups if "exponents" in group),
    ]
    if not panels:
        return
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with figure(path, rows, columns, figsize=(5 * columns, 2.6 * rows), squeeze=False) as axes:
        for panel, ax in zip(panels, axes.flat, strict=False):
            _growth(ax, panel) if "exponents" in panel else _ratios(ax, panel["rows"])
            ax.set_title(panel["title"], fontsize=10)
        for ax in axes.flat[len(panels) :]:
            ax.set_axis_off()


def _ratios(axes: Axes, rows: Mapping[str, Any]) -> None:
    """Each row's ratio to the first with its quartiles; the grey band is the noise of the first."""
    baseline, *names = rows
    noise = rows[baseline + AGAIN]["ratio"]
    axes.axvspan(noise["low"], noise["high"], color=GREY, alpha=0.3, linewidth=0)
    axes.axvline(1, color="black", linewidth=0.8)
    for place, name in enumerate(names):
        median, low, high = (rows[name]["ratio"][key] for key in ("median", "low", "high"))
        color = GREY if name.endswith(AGAIN) else BLUE
        axes.errorbar(median, place, xerr=[[median - low], [high - median]], fmt="o", color=color)
        axes.annotate(
            f"{median:.3g}",
            (median, place),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    medians = [rows[name]["ratio"]["median"] for name in names]
    if max(medians) / min(medians) > WIDE:
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.7)
    axes.set_xlabel(f"time relative to {baseline!r}")


def _growth(axes: Axes, group: Mapping[str, Any]) -> None:
    """Time and memory over the size that grows."""
    sizes = [[int(size) for size in name.split(" x ")] for name in group["rows"]]
    axis = 0 if sizes[0][0] != sizes[-1][0] else 1
    x = [size[axis] for size in sizes]
    rows = list(group["rows"].values())
    lines = {
        "time": ([row["ms"]["median"] for row in rows], "ms", BLUE),
        "time of the assignment": ([row["assignment_ms"] for row in rows], "ms", ORANGE),
        "memory": ([row["peak_mib"] for row in rows], "MiB", GREEN),
    }
    for name, (y, unit, color) in lines.items():
        label = f"{name} [{unit}], exponent {group['exponents'][name]:.2f}"
        axes.loglog(x, y, ".-", color=color, label=label)
    axes.set_xticks(x, [str(size) for size in x])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("samples" if axis == 0 else "tokens")
    axes.legend(fontsize=8)
