"""`make bench`, `make cost` and Table 3's latency: what they print and write, at tiny size."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.doors import Result, assert_succeeded, cells, script

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="they would measure the GPU")
MODEL = "cct_2_3x2"
STEPS = ["plain", "plain again", "HTM", "VTM", "both"]


def rows_of(result: Result) -> dict[str, list[str]]:
    """The rows of all printed tables, by their first cell."""
    return {name: others for name, *others in cells(result.out)}


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


class Measured(NamedTuple):
    result: Result
    report: dict[str, Any]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """A measurement of two rounds, and its file."""
    path = tmp_path_factory.mktemp("bench") / "new" / "bench.json"
    result = script("bench", MODEL, "--rounds", "2", "--out", str(path))
    assert_succeeded(result)
    return Measured(result, json.loads(path.read_text()))


def assert_ordered(times: dict[str, float]) -> None:
    order = [times[name] for name in ("low", "median", "high")]
    assert order == sorted(order)
    assert order[0] > 0


def test_bench_times_plain_steps_beside_htm_and_vtm(measured: Measured):
    steps = measured.report["tables"][f"{MODEL}, eager"]
    assert list(steps) == STEPS
    for row in steps.values():
        assert row["images/s"] == pytest.approx(128_000 / row["ms"]["median"])
        assert row["tokens"] < 64
        assert_ordered(row["ms"])
    assert steps["plain"]["ratio"]["median"] == 1
    mixing = [name for name, row in steps.items() if row["tokens"] > 1]
    assert mixing == ["HTM", "both"]


def test_bench_times_the_assignment(measured: Measured):
    assignment = measured.report["tables"]["assignment"]
    assert len(assignment) == 4
    for row in assignment.values():
        assert_ordered(row["ms"])


def test_bench_prints_what_it_writes(measured: Measured):
    tables = measured.report["tables"]
    shown = rows_of(measured.result)
    assert shown.keys() >= {*STEPS, *tables["assignment"]}
    median = tables[f"{MODEL}, eager"]["HTM"]["ms"]["median"]
    assert shown["HTM"][0].startswith(f"{median:.4g} (")
    assert measured.report["rounds"] == 2
    assert measured.report["torch"] == torch.__version__


OF_OURS = """
title: one
rows:
  tiny: [model.embed_dim=16, recipe.epochs=30000]
  few: [model.embed_dim=16, recipe.epochs=500000, recipe.evaluate_every=2, dataset.limit=640,
    dataset.eval_limit=90, dataset.validation=0.1]
  conv: [model=timm, model.architecture=resnet18, 'augmentation=[]']  # has no blocks
"""


def test_cost_multiplies_the_time_of_an_image_by_the_images_of_all_runs(here: Path):
    Path("own.yaml").write_text(OF_OURS)
    result = script("cost", "own.yaml", "--seeds", "2")
    assert_succeeded(result, "load average")
    rows = rows_of(result)
    work = {
        "own/tiny": 30000 * (22 * 64 + 360 / 3),
        "own/few": 500000 * 9 * 64 + (250000 * 64 + 2 * 90) / 3,
    }
    for name, images in work.items():
        runs, batch, timed, speed, hours = map(number, rows[name])
        assert (runs, batch, timed) == (2, 64, 16)
        assert hours == pytest.approx(images / speed / 3600, rel=0.05)
    told = re.search(r"own: 3 rows, (.*) hours, (.*) (days|years) with all runs", result.out)
    assert told, result.out
    in_all = 2 * sum(number(rows[name][4]) for name in (*work, "own/conv"))
    assert number(told[1]) == pytest.approx(in_all, rel=0.01)
    assert number(told[2]) == pytest.approx(in_all / {"days": 24, "years": 8766}[told[3]], rel=0.05)


PAPERS = {"attention": ("16", "1.0"), "gradient": ("236", "14.8"), "random": ("5", "0.3")}


def test_latency_of_each_detector_stands_beside_the_papers(tmp_path: Path):
    result = script("latency", "--rounds", "1", "--images", "2", "--outputs", str(tmp_path))
    assert_succeeded(result)
    rows = rows_of(result)
    for name, (ms, ratio) in PAPERS.items():
        assert rows[name][1] == ms
        assert rows[name][3] == ratio
    assert rows["attention"][2] == "1.0"
