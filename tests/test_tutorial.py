"""docs/tutorial.ipynb runs from the first cell to the last, and is stored without output."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorial.ipynb"


def test_notebook_runs_and_reports_the_mixing(monkeypatch: pytest.MonkeyPatch):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(cells) == 10
    assert len(codes) == 8
    figures: list[Any] = []
    monkeypatch.setattr(plt, "show", lambda: figures.append(plt.gcf()))
    names: dict[str, Any] = {}
    with redirect_stdout(io.StringIO()) as out:
        for code in codes:
            exec(code, names)
    plt.close("all")
    assert len(figures) == 2
    mixed = [line["mixed_samples"] for line in names["history"]]
    assert fmean(mixed[:20]) < 5
    assert fmean(mixed[-20:]) > 30
    assert names["accuracy"] > 0.6
    shown = names["shown"]
    kept = names["pairs"].keep_ratio[shown]
    assert names["replaced"][shown].min() > 3
    assert kept.min() > 0
    assert kept.max() < 1
    accuracy = names["accuracy"]
    assert f"held-out accuracy {accuracy:.1%}" in out.getvalue()


def test_notebook_is_stored_without_output():
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
