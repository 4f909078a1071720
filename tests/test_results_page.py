"""docs/results.md agrees with results/*.jsonl by statistics without the code of the tables."""

import json
import re
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import yaml
from scipy.stats import t

ROOT = Path(__file__).parents[1]
STUDIES = sorted(path.stem for path in (ROOT / "results").glob("*.jsonl"))
FORMS = {"top1_last": ".2f", "top5_last": ".2f", "loss_last": ".3f"}


def printed(section: str) -> dict[str, set[str]]:
    """Returns the cells of a section's tables by the text of their row, whatever their columns."""
    cells: dict[str, set[str]] = {}
    for line in section.splitlines():
        if line.startswith("|"):
            first, *others = [x.strip() for x in line.split("|")[1:-1]]
            cells.setdefault(first, set()).update(others)
    return cells


def interval(gaps: list[float], spec: str) -> str:
    half = t.ppf(0.975, len(gaps) - 1) * stdev(gaps) / len(gaps) ** 0.5
    return f"{fmean(gaps) - half:+{spec}} to {fmean(gaps) + half:+{spec}}"


def p_of(gaps: list[float]) -> float:
    value = fmean(gaps) / (stdev(gaps) / len(gaps) ** 0.5)
    return float(2 * t.sf(abs(value), len(gaps) - 1))


def values_of(study: str) -> dict[str, dict[str, dict[int, float]]]:
    """Returns outcome -> row -> seed -> value."""
    values: dict[str, dict[str, dict[int, float]]] = {name: {} for name in FORMS}
    for text in (ROOT / f"results/{study}.jsonl").read_text().splitlines():
        line = json.loads(text)
        row = re.fullmatch(rf"{study}-(.+)-s\d+-\w+", line["name"])[1]  # type: ignore[index]
        last = line["log"][-1]
        for name, key in zip(FORMS, ("top1", "top5", "eval_loss"), strict=True):
            values[name].setdefault(row, {})[line["seed"]] = last[key]
    return values


@pytest.mark.parametrize("study", STUDIES)
def test_page_has_the_statistics_of_the_published_lines(study: str):
    file: dict[str, Any] = yaml.safe_load((ROOT / f"results/{study}.yaml").read_text())
    values = values_of(study)
    tested = file.get("tested", "top1_last")
    page = (ROOT / "docs/results.md").read_text()
    (section,) = (x for x in page.split("\n## ") if f"`results/{study}.yaml`" in x)
    cells = printed(section)
    p = {}
    assert set(file["rows"]) == set(values[tested]) <= set(cells)
    for row, settings in file["rows"].items():
        options = settings if isinstance(settings, dict) else {}
        for name, spec in FORMS.items():
            ours = values[name][row]
            numbers = ours.values()
            means = {f"{fmean(numbers) + x:{spec}}" for x in (-1e-9, 1e-9)}  # 92.545 is either
            assert {f"{mean} +/- {stdev(numbers):{spec}}" for mean in means} & cells[row]
            if "against" not in options:
                continue
            base = values[name][options["against"]]
            gaps = [x - base[seed] for seed, x in ours.items() if seed in base]
            assert {f"{fmean(gaps):+{spec}}", interval(gaps, spec)} <= cells[row]
            assert {str(len(ours)), str(len(gaps))} <= cells[row]
            if name == "loss_last":
                assert f"{sum(x < 0 for x in gaps)} of {len(gaps)}" in cells[row]
            if name == tested and options.get("role") != "untested":
                value = p_of(gaps)
                assert f"{value:.3f}" in cells[row]
                if options.get("role") != "primary":
                    p[row] = value
        assert options.get("role", "") in {"", *cells[row]}
    largest = 0.0
    for place, row in enumerate(sorted(p, key=lambda name: p[name])):  # Holm (1979)
        largest = max(largest, min(1.0, (len(p) - place) * p[row]))
        assert f"{largest:.3f}" in cells[row]
