"""The page of the paper's tables, made from run folders."""

import base64
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest
import yaml
from PIL import Image

from tests.doors import SMALL, Run, config_of, script, train
from tests.reproduction.test_tables import write

pytestmark = pytest.mark.usefixtures("here")
HTM = "experiment=table1/cifar100_htm"
ROWS = {
    "base": ["experiment=table1/cifar100_baseline"],
    "htm": [HTM],
    "tau1": [HTM, "augmentation.htm.tau=1"],
    "other": [],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("report")
    assert train(*SMALL, "recipe.max_steps=1", f"output_root={root}", "name=mine").status == 0
    return Run(root / "mine")


def finished(model: Run, name: str, seed: int = 0, **summary: object) -> Path:
    """Writes a run of a row of the paper with the summary of another one."""
    folder, row = write(model, name, {}, seed, **summary), ROWS[name.partition("-")[0]]
    config = asdict(config_of(*row)) | {"seed": seed}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_page_shows_the_papers_rows_with_our_results(trained: Run):
    for seed in range(3):
        finished(trained, f"base-{seed}", seed, top1_last=80.0 + seed)
        run = finished(trained, f"htm-{2 - seed}", 2 - seed, top1_last=85.0 - 2 * seed)
        finished(trained, f"tau1-{seed}", seed)
    for name in ("saliency", "mixed_samples"):
        Image.new("RGB", (60, 30)).save(run / f"{name}.png")
    error = "<script>alert(1)</script>"
    finished(trained, "htm-9", 2, status="failed", error=error)
    finished(trained, "other-0")
    Path("outputs/notes").mkdir()
    result = script("report")
    assert result.status == 0 and result.out.strip() == "outputs/report/index.html", result.err
    page = Path("outputs/report/index.html").read_text()
    assert "83.00 +/- 2.00" in page and "CCT-7/3x1(1500) + HTM + VTM" in page
    assert "WARNING" not in page and "<script>" not in page and "&lt;script&gt;alert(1)" in page
    assert "<td>86.57</td>" in page and "<td>87.34</td>" in page  # parameters, counted
    images = [base64.b64decode(x) for x in re.findall(r"base64,([^\"]+)", page)]
    assert len(images) == 4  # two sweeps with runs, Figures 3 and 4
    assert page.count("No run of it is finished.") >= 2  # the sweep of kappa, mixed pairs
    numbers = pd.read_csv("outputs/report/table1.csv")
    top1 = numbers[numbers.outcome == "top1_last"].set_index("label")
    row = top1.loc["table1/cifar100_htm"]
    assert row.minus_paper == pytest.approx(83 - 83.56) and row.difference == pytest.approx(2)
    assert row.printed_difference == pytest.approx(83.56 - 82.87)
    assert len(top1) == 8 + 28 and top1.loc["table1/cifar100_vtm"].n == 0
    sweep = pd.read_csv("outputs/report/sweep-tau.csv").set_index("row")
    assert sweep.n[sweep.outcome == "top1_last"]["tau=2"] == 3  # the paper's own value
    assert script("report").status == 0
    assert Path("outputs/report/index.html").read_text() == page  # byte for byte


def test_a_page_of_other_runs_says_so(trained: Run):
    write(trained, "mine", {})
    shutil.move("outputs", "smoke")
    assert script("report", "--scale", "smoke", "--outputs", "smoke").status == 0
    assert "WARNING. smoke scale" in Path("smoke/report/index.html").read_text()
    assert script("report", "--outputs", "smoke", "recipe.epochs=3").status == 0
    assert "WARNING. recipe.epochs=3" in Path("smoke/report/index.html").read_text()


@pytest.mark.parametrize("words", [("--outputs", "nowhere"), ("--scale", "huge"), ("--x",)])
def test_a_report_that_cannot_be_made_is_refused_in_a_line(words: tuple[str, ...]):
    result = script("report", *words)
    assert (result.status, len(result.lines)) == (2, 1) and words[-1].strip("-") in result.err
