"""`python -m scripts.benchmark` from its command line to its file, tables and comparison."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from reproduction.system.errors import UserError
from scripts.benchmark.__main__ import main, markdown, read_report, slower

TITLE = "training step: cct_7_3x1, batch of 16"
MACHINE = {"hardware": "a machine", "device": "cpu", "threads": 2, "versions": {"torch": "2"}}


def call(monkeypatch: pytest.MonkeyPatch, outputs: Path, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--outputs", str(outputs), *args])
    main()


def spread(median: float) -> dict[str, Any]:
    interval = [median * 0.995, median * 1.005]
    return {"median": median, "low": median * 0.99, "high": median * 1.01, "interval": interval}


def report(ratio: float, ms: float = 1234.5) -> dict[str, Any]:
    rows = {
        "plain": {"ms": spread(ms), "ratio": spread(1)},
        "plain, again": {"ms": spread(ms), "ratio": spread(1.002)},
        "HTM": {"ms": spread(ms * ratio), "ratio": spread(ratio), "images_per_second": 12.345},
    }
    group = {"title": TITLE, "about": "float32", "rows": rows, "left_out": {"VTM": "no memory"}}
    head = {"revision": "0123456789abcdef-dirty", "rounds": 40, "load_average": [0.5, 2.25]}
    return {"machine": MACHINE, **head, "groups": [group]}


def test_a_run_writes_one_file_and_compares_it_with_an_earlier_one(monkeypatch, capsys, tmp_path):
    args = ["--device", "cpu", "--sizes", "cct_2_3x2:4", "--pairs", "2"]
    call(monkeypatch, tmp_path, *args)
    (path,) = (tmp_path / "benchmark").iterdir()
    measured = json.loads(path.read_text())
    assert measured["machine"]["threads"] == torch.get_num_threads() and measured["rounds"] == 2
    (group,) = measured["groups"]
    assert [*group["rows"]] == ["plain", "plain, again", "HTM", "HTM and VTM", "VTM"]
    for name, row in group["rows"].items():
        assert row["images_per_second"] == pytest.approx(4000 / row["ms"]["median"])
        assert row["mixed_samples"] == (4 if "HTM" in name else 0)
    assert markdown(measured) in capsys.readouterr().out

    group["rows"]["HTM"]["ms"] = dict.fromkeys(("median", "low", "high"), 1e-6) | {
        "interval": [1e-6, 1e-6]
    }
    path.write_text(json.dumps(measured))
    call(monkeypatch, tmp_path, *args, "--compare", str(path))
    assert f"slower: {group['title']}: HTM: 1e-06 -> " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--sizes", "resnet18:8"], "sizes=resnet18:8: the model must be one of"),
        (["--sizes", "cct_7_3x1:x"], "sizes=cct_7_3x1:x: must be MODEL:BATCH, with a batch of 2"),
        (["--sizes", "cct_7_3x1:1"], "sizes=cct_7_3x1:1: must be MODEL:BATCH, with a batch of 2"),
        (["--compare", "nowhere.json"], "compare=nowhere.json: is no benchmark.json"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    monkeypatch, capsys, tmp_path: Path, args, message: str
):
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, tmp_path, "--device", "cpu", *args)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"benchmark: {message}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["{", "[]", '{"machine": {}, "groups": [1]}', '{"groups": {}}'])
def test_other_files_are_not_compared_with(tmp_path: Path, content: str):
    path = tmp_path / "old.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"old\.json: is no benchmark\.json"):
        read_report(path, report(1))


@pytest.mark.parametrize("changed", [{"threads": 1}, {"versions": {"torch": "3"}}], ids=str)
def test_reports_of_other_machines_are_not_compared_with(tmp_path: Path, changed: dict[str, Any]):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({**report(1), "machine": {**MACHINE, **changed}}))
    if "threads" in changed:
        with pytest.raises(UserError, match=r"old\.json: measured with threads 1, this is 2"):
            read_report(path, report(1))
    else:
        assert read_report(path, report(1))["rounds"] == 40


def test_slower_ignores_differences_within_noise():
    assert slower(report(1.04), report(1.05)) == []
    assert len(slower(report(1.04), report(1.06))) == 2
    assert slower(report(1.04), report(1.20)) == [
        "slower: training step: cct_7_3x1, batch of 16: HTM: 1284 -> 1481 ms",
        "slower: training step: cct_7_3x1, batch of 16: HTM: 1.04 -> 1.2 times plain",
    ]
    assert slower(report(1.20), report(1.04)) == []
    with pytest.raises(
        UserError, match="compare: the earlier run has none of the measured figures"
    ):
        slower({"machine": MACHINE, "groups": []}, report(1))


def test_markdown_shows_rows_with_noise_and_what_was_left_out():
    lines = markdown(report(1.043)).splitlines()
    assert "| plain, again | 1,234 (1,222 to 1,247) | 1.002 (0.9920 to 1.012) |  |" in lines
    assert any(line.startswith("| HTM | 1,288 ") and line.endswith("| 12.35 |") for line in lines)
    assert "40 rounds, load average 0.5 before and 2.2 after" in lines[0]
    assert "revision 0123456789ab-dirty." in lines[0]
    assert lines[-1] == "Not timed: VTM: no memory"
