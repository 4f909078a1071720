"""docs/tutorial.ipynb runs from the first cell to the last, and is stored with its output."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorial.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODES = [cell for cell in CELLS if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_notebook_runs_and_reports_the_mixing(monkeypatch: pytest.MonkeyPatch):
    codes = ["".join(cell["source"]) for cell in CODES]
    assert len(codes) == 10
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


def test_notebook_is_stored_with_its_output():
    outputs = [
        output
        for number, cell in enumerate(CODES, 1)
        for output in cell["outputs"]
        if cell["execution_count"] == number  # from the first to the last, once
    ]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    texts = [line for output in outputs for line in output.get("text", [])]
    assert any(line.startswith("held-out accuracy") for line in texts)
    assert {output.get("name", "picture") for output in outputs} == {"stdout", "picture"}
