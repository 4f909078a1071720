"""benchmark.json is updated, compared with earlier runs and rendered as tables."""

from pathlib import Path
from typing import Any

import pytest

from reproduction.system.errors import UserError
from scripts.benchmark.report import (
    add_groups,
    check_machine,
    check_page,
    markdown,
    put_on_page,
    read_report,
    slower,
)

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"

MACHINE: dict[str, Any] = {
    "hardware": "a machine",
    "device": "cpu",
    "threads": 2,
    "versions": {"torch": "2"},
}


def spread(median: float) -> dict[str, Any]:
    interval = [median * 0.995, median * 1.005]
    return {"median": median, "low": median * 0.99, "high": median * 1.01, "interval": interval}


TITLE = "training step: cct_7_3x1, batch of 16"


def section(ratio: float, ms: float = 1234.5, title: str = TITLE) -> list[dict[str, Any]]:
    rows = {
        "plain": {"ms": spread(ms), "ratio": spread(1)},
        "plain, again": {"ms": spread(ms), "ratio": spread(1.002)},
        "HTM": {"ms": spread(ms * ratio), "ratio": spread(ratio), "images_per_second": 12.345},
        "VTM": {"ms": spread(ms), "ratio": spread(1)},
    }
    measured = {
        "rounds": 40,
        "quick": False,
        "load_average": [0.5, 2.25],
        "seconds": 3,
        "git_revision": "0123456789abcdef",
    }
    return [{"title": title, "about": "float32", "rows": rows, "measured": measured}]


def report(ratio: float, ms: float = 1234.5) -> dict[str, Any]:
    return {"machine": MACHINE, "sections": {"steps": section(ratio, ms)}}


def test_add_groups_keeps_other_groups_of_the_same_machine(tmp_path: Path):
    path = tmp_path / "benchmark" / "benchmark.json"
    add_groups(path, MACHINE, "steps", section(1.1))
    add_groups(path, MACHINE, "oracle", section(1.2))
    assert list(read_report(path)["sections"]) == ["steps", "oracle"]
    add_groups(path, MACHINE, "steps", section(1.3, title="another size"))
    add_groups(path, MACHINE, "steps", section(1.4))
    first, second = read_report(path)["sections"]["steps"]
    assert (first["title"], second["title"]) == (TITLE, "another size")
    assert first["rows"]["HTM"]["ratio"]["median"] == 1.4
    before = path.read_text()
    with pytest.raises(UserError, match=r"benchmark\.json: measured with threads 2, this is 8"):
        add_groups(path, {**MACHINE, "threads": 8}, "steps", section(1.3))
    assert path.read_text() == before


@pytest.mark.parametrize(
    "content", [None, "{", "[]", '{"machine": {}, "sections": {"steps": [1]}}', '{"sections": {}}']
)
def test_read_report_refuses_other_files(tmp_path: Path, content: str | None):
    path = tmp_path / "old.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"old\.json: is no benchmark\.json"):
        read_report(path)


def test_slower_ignores_differences_within_noise():
    assert slower(report(1.04), report(1.05)) == []
    assert len(slower(report(1.04), report(1.06))) == 2
    assert slower(report(1.04), report(1.20)) == [
        "slower: training step: cct_7_3x1, batch of 16: HTM: 1284 -> 1481 ms",
        "slower: training step: cct_7_3x1, batch of 16: HTM: 1.04 -> 1.2 times the first row",
    ]
    assert slower(report(1.20), report(1.04)) == []


def test_check_machine_refuses_other_machines():
    other = {**report(1), "machine": {**MACHINE, "threads": 1}}
    with pytest.raises(UserError, match="old: measured with threads 1, this is 2"):
        check_machine(other, MACHINE, "old")
    newer = {**MACHINE, "versions": {"torch": "3"}}
    with pytest.raises(UserError, match="versions"):
        check_machine(report(1), newer, "old")
    check_machine(report(1), newer, "old", except_for=("versions",))


def test_slower_refuses_runs_without_common_figures():
    with pytest.raises(
        UserError, match="compare: the earlier run has none of the measured figures"
    ):
        slower({"machine": MACHINE, "sections": {}}, report(1))


def test_markdown_shows_rows_with_noise():
    lines = markdown(report(1.043)).splitlines()
    assert "| plain, again | 1,234 (1,222 to 1,247) | 1.002 (0.9920 to 1.012) |  |" in lines
    assert any(line.startswith("| HTM | 1,288 ") and line.endswith("| 12.35 |") for line in lines)
    assert "40 rounds, load average 0.5 before and 2.2 after, revision 0123456789ab." in lines


def test_markdown_marks_a_dirty_revision():
    dirty = report(1)
    dirty["sections"]["steps"][0]["measured"]["git_revision"] += "-dirty"
    assert "revision 0123456789ab-dirty." in markdown(dirty)


def test_put_on_page_replaces_the_text_between_marks(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nend\n")
    put_on_page(page, "new\n", "tables")
    put_on_page(page, "newer\n", "tables")
    assert page.read_text() == f"# Title\n\n{BEGIN}\nnewer\n{END}\n\nend\n"


@pytest.mark.parametrize("content", [None, "no marks", f"{END} {BEGIN}"])
def test_check_page_refuses_a_page_without_marks(tmp_path: Path, content: str | None):
    page = tmp_path / "page.md"
    if content is not None:
        page.write_text(content)
    with pytest.raises(UserError, match=r"page=.*page\.md: "):
        check_page(page, "tables")
