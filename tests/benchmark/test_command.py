"""`python -m scripts.benchmark` from its command line to its files."""

import json
import sys
from pathlib import Path

import pytest
import torch

from scripts.benchmark.__main__ import SECTIONS, main
from scripts.benchmark.pipeline import FEEDS
from scripts.benchmark.steps import VARIANTS


def call(monkeypatch: pytest.MonkeyPatch, outputs: Path, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--quick", "--outputs", str(outputs), *args])
    main()


def test_quick_run_writes_all_sections(monkeypatch, capsys, tmp_path: Path):
    sections = [name for name in SECTIONS if name != "startup"]
    call(monkeypatch, tmp_path, "--device", "cpu", "--sections", *sections)
    folder = tmp_path / "benchmark-quick"
    written = sorted(path.name for path in folder.iterdir())
    assert written == ["benchmark.json", "benchmark.md"]
    report = json.loads((folder / "benchmark.json").read_text())
    assert report["machine"]["threads"] == torch.get_num_threads()
    assert list(report["sections"]) == sections
    (steps,) = report["sections"]["steps"]
    assert list(steps["rows"]) == list(VARIANTS)
    for name, row in steps["rows"].items():
        assert row["ms"]["median"] > 0 and row["peak_mib"] > 1
        assert row["images_per_second"] == pytest.approx(4000 / row["ms"]["median"])
        assert row["mixed_samples"] == (4 if "HTM" in name else 0)
        assert (0 < row.get("matching", 0) < 1) == ("HTM" in name)
    (oracle,) = report["sections"]["oracle"]
    assert oracle["rows"]["HTM and VTM, oracle"]["mixed_tokens"] > 1
    (detectors,) = report["sections"]["detectors"]
    assert detectors["rows"]["gradient"]["ratio"]["median"] > 1
    pipeline, to_weights = report["sections"]["pipeline"]
    assert list(pipeline["rows"]) == list(FEEDS)
    loaded = pipeline["rows"] | to_weights["rows"]
    assert all(row["images_per_second"] > 1 for row in loaded.values())
    out = capsys.readouterr().out
    assert (folder / "benchmark.md").read_text() in out
    assert "| vit_base_patch16_224, cudnn_attention | not measured |" in out
    assert "A quick try, not a measurement." in out


def test_compare_reports_slower_rows(monkeypatch, capsys, tmp_path: Path):
    args = ["--device", "cpu", "--sections", "parts"]
    call(monkeypatch, tmp_path, *args)
    path = tmp_path / "benchmark-quick" / "benchmark.json"
    report = json.loads(path.read_text())
    (group,) = report["sections"]["parts"]
    name, row = next(iter(group["rows"].items()))
    row["ms"] = {"median": 1e-6, "low": 1e-6, "high": 1e-6, "interval": [1e-6, 1e-6]}
    old = tmp_path / "old.json"
    old.write_text(json.dumps(report))
    capsys.readouterr()
    call(monkeypatch, tmp_path, *args, "--compare", str(old))
    out = capsys.readouterr().out
    assert f"slower: {group['title']}: {name}: 1e-06 -> " in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--pairs", "0"], "pairs=0: must be 1 or more"),
        (["--sizes", "resnet18:8"], "sizes=resnet18:8: the model must be one of"),
        (["--compare", "nowhere.json"], "nowhere.json: is no benchmark.json"),
        (["--page", "nowhere.md"], "page=nowhere.md: No such file"),
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
