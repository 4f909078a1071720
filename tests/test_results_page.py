"""docs/results.md agrees with results/*.jsonl by statistics without the code of the tables."""

import json
import re
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from scipy.stats import t

ROOT = Path(__file__).parents[1]
BASES = {  # row -> the row that it is compared with
    "htm": "none",
    "vtm": "none",
    "mixup+cutmix": "none",
    "mixup+cutmix+htm": "mixup+cutmix",
    "mixup+cutmix+vtm": "mixup+cutmix",
    "mixup+cutmix+htm+vtm": "mixup+cutmix",
}
UNTESTED = "mixup+cutmix"
Cells = dict[str, dict[str, str]]  # row -> title -> text


def printed(section: str) -> tuple[Cells, Cells]:
    """Reads the two tables of a section."""
    tables: list[Cells] = []
    for block in re.findall(r"(?:^\|.*\n)+", section, re.M):
        titles, _, *rows = [
            [x.strip() for x in line.split("|")[1:-1]] for line in block.split("\n")[:-1]
        ]
        tables.append({row[0]: dict(zip(titles, row, strict=True)) for row in rows})
    first, second = tables
    return first, second


def interval(gaps: list[float], spec: str) -> str:
    half = t.ppf(0.975, len(gaps) - 1) * stdev(gaps) / len(gaps) ** 0.5
    return f"{fmean(gaps) - half:{spec}} to {fmean(gaps) + half:{spec}}"


def p_of(gaps: list[float]) -> float:
    value = fmean(gaps) / (stdev(gaps) / len(gaps) ** 0.5)
    return float(2 * t.sf(abs(value), len(gaps) - 1))


@pytest.mark.parametrize("study", ["cifar10_1k", "cifar10_5k", "digits100"])
def test_page_has_the_statistics_of_the_published_lines(study: str):
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (ROOT / f"results/{study}.jsonl").read_text().splitlines()
    ]
    values: dict[str, dict[str, dict[int, float]]] = {"top-1": {}, "top-5": {}, "loss": {}}
    for line in lines:
        row = re.fullmatch(rf"{study}-(.+)-s\d+-\w+", line["name"])[1]  # type: ignore[index]
        last = line["log"][-1]
        for name, value in (
            ("top-1", last["top1"]), ("top-5", last["top5"]), ("loss", last["eval_loss"]),
        ):  # fmt: skip
            values[name].setdefault(row, {})[line["seed"]] = value
    page = (ROOT / "docs/results.md").read_text()
    (section,) = (x for x in page.split("\n## ") if f"`results/{study}.yaml`" in x)
    main, second = printed(section)
    assert set(main) == set(values["top-1"]) == set(second)
    p = {}
    for row, cells in main.items():
        seeds = values["top-1"][row]
        assert cells["n"] == str(len(seeds))
        assert cells["last"] == f"{fmean(seeds.values()):.2f} +/- {stdev(seeds.values()):.2f}"
        losses = values["loss"][row].values()
        assert second[row]["loss"] == f"{fmean(losses):.3f} +/- {stdev(losses):.3f}"
        if (base := BASES.get(row)) is None:
            assert {cells["difference"], cells["p"], second[row]["loss, difference"]} == {"-"}
            continue
        gaps = {
            name: [by_row[row][s] - by_row[base][s] for s in seeds if s in by_row[base]]
            for name, by_row in values.items()
        }
        assert cells["pairs"] == second[row]["pairs"] == str(len(gaps["loss"]))
        assert cells["difference"] == f"{fmean(gaps['top-1']):+.2f}"
        assert cells["95 % interval"] == interval(gaps["top-1"], "+.2f")
        assert second[row]["loss, difference"] == f"{fmean(gaps['loss']):+.3f}"
        assert second[row]["95 % interval of loss"] == interval(gaps["loss"], "+.3f")
        assert (
            second[row]["lower in"] == f"{sum(x < 0 for x in gaps['loss'])} of {len(gaps['loss'])}"
        )
        assert second[row]["top-5, difference"] == f"{fmean(gaps['top-5']):+.2f}"
        assert second[row]["95 % interval of top-5"] == interval(gaps["top-5"], "+.2f")
        if row != UNTESTED:
            p[row] = p_of(gaps["top-1"])
            assert cells["p"] == f"{p[row]:.3f}"
    assert main[UNTESTED]["p"] == "-" and main[UNTESTED]["p (Holm)"] == "untested"
    largest = 0.0
    for place, row in enumerate(sorted(p, key=lambda name: p[name])):  # Holm (1979)
        largest = max(largest, min(1.0, (len(p) - place) * p[row]))
        assert main[row]["p (Holm)"] == f"{largest:.3f}"
