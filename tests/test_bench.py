"""`make bench`, `make cost` and Table 3's latency: what they print and write, at tiny size."""

import json
from pathlib import Path

import pytest
import torch

from tests.doors import Result, script

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="they would measure the GPU")
MODEL = "cct_2_3x2"
STEPS = ["plain", "plain again", "HTM", "VTM", "both"]


def rows_of(result: Result) -> dict[str, list[str]]:
    """The rows of all printed tables, by their first cell."""
    lines = [line for line in result.out.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A measurement of two rounds, and its file."""
    path = tmp_path_factory.mktemp("bench") / "new" / "bench.json"
    result = script("bench", MODEL, "--rounds", "2", "--out", str(path))
    assert result.status == 0, result.err
    return result, path


def test_bench_times_plain_steps_beside_htm_and_vtm(measured: tuple[Result, Path]):
    result, path = measured
    report = json.loads(path.read_text())
    assert report["rounds"] == 2
    assert report["torch"] == torch.__version__
    steps = report["tables"][f"{MODEL}, eager"]
    assignment = report["tables"]["assignment"]
    assert [*steps] == STEPS
    assert len(assignment) == 4
    for name, row in steps.items():
        assert row["images/s"] == pytest.approx(128_000 / row["ms"]["median"])
        assert (row["tokens"] > 1) == (name in ("HTM", "both"))
        assert row["tokens"] < 64
        assert row["ratio"]["median"] == 1 or name != "plain"
    for each in [row["ms"] for row in (*steps.values(), *assignment.values())]:
        assert 0 < each["low"] <= each["median"] <= each["high"]
    shown = rows_of(result)
    assert {*STEPS, *assignment} <= {*shown}
    assert shown["HTM"][0].startswith(f"{steps['HTM']['ms']['median']:.4g} (")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("bench", "resnet18"), "models=resnet18"),
        (("bench", MODEL, "--rounds", "0"), "rounds"),
        (("cost", "table9"), "table9"),
        (("cost", "--seeds", "x"), "seeds"),
        (("latency", "--rounds", "-1"), "rounds"),
    ],
    ids=str,
)
def test_mistakes_are_refused_in_one_line(here: Path, words: tuple[str, ...], part: str):
    result = script(*words)
    assert (result.status, len(result.lines)) == (2, 1), result
    assert part in result.lines[0]
    assert not [*here.iterdir()]


def test_cost_multiplies_the_time_of_an_image_by_the_images_of_all_runs(here: Path):
    study = "title: one\nrows:\n  tiny: [model.embed_dim=16, recipe.epochs=30000]\n"
    study += "  conv: [model=timm, model.architecture=resnet18, 'augmentation=[]']\n"  # no blocks
    Path("own.yaml").write_text(study)
    result = script("cost", "own.yaml", "--seeds", "2")
    assert result.status == 0, result.err
    rows = rows_of(result)
    runs, batch, timed, speed, hours = (float(x.replace(",", "")) for x in rows["own/tiny"])
    assert (runs, batch, timed) == (2, 64, 16)
    assert hours == pytest.approx(30000 * (1437 + 360 / 3) / speed / 3600, rel=0.01)
    conv = float(rows["own/conv"][4].replace(",", ""))
    assert float(rows["own"][0].replace(",", "")) == pytest.approx(2 * (hours + conv), rel=0.01)
    assert "load average" in result.out


def test_latency_of_each_detector_stands_beside_the_papers(tmp_path: Path):
    result = script("latency", "--rounds", "1", "--images", "2", "--outputs", str(tmp_path))
    assert result.status == 0, result.err
    rows = rows_of(result)
    papers = {name: (rows[name][1], rows[name][3]) for name in ("attention", "gradient", "random")}
    assert papers == {
        "attention": ("16", "1.0"),
        "gradient": ("236", "14.8"),
        "random": ("5", "0.3"),
    }
    assert rows["attention"][2] == "1.0"
