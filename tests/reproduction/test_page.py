"""The report of a scale: its page, files, pictures and what is missing."""

import re
import sys
from pathlib import Path

import pytest
from PIL import Image

from reproduction.studies.page import write_page
from reproduction.studies.pictures import _draw_sweep
from reproduction.studies.plan import points_of, studies_of
from reproduction.studies.runs import read_runs
from reproduction.studies.study import Settings
from reproduction.system.errors import UserError
from scripts import report
from tests.reproduction.conftest import config_of
from tests.reproduction.tables import Configs, result, write_run

BASELINE, HTM = "table1/cifar100_baseline", "table1/cifar100_htm"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory, configs: Configs) -> Path:
    """Runs of a few rows with metrics and pictures, one failed, and two other folders."""
    outputs = tmp_path_factory.mktemp("page") / "outputs"
    for seed in range(2):
        write_run(outputs, configs[BASELINE], seed, f"base{seed}")
        write_run(outputs, configs[HTM], seed, f"htm{seed}", top1=81.0 + 2 * seed)
        write_run(outputs, configs["sweep-tau/tau=1"], seed, f"tau{seed}")
    for name in ("saliency", "mixed_pairs", "mixed_samples"):
        for suffix in ("png", "pdf"):
            Image.new("RGB", (60, 30)).save(outputs / "htm0" / f"{name}.{suffix}")
    failed = {"status": "failed", "error": "<script>alert(1)</script>"}
    write_run(outputs, configs["table3/gradient"], 0, "gradient", **failed)
    write_run(outputs, config_of(), 0, "mine")
    (outputs / "notes").mkdir()
    return outputs


@pytest.fixture(scope="module")
def page(outputs: Path) -> str:
    return write_page(Settings(outputs=str(outputs))).read_text()


def test_page_shows_tables_figures_and_runs(page: str, outputs: Path):
    assert "81.50" not in page.partition("<main>")[0]
    assert "82.00 &plusmn; 1.41" in page and "Table 1: Accuracy on CIFAR-10 and CIFAR-100" in page
    assert page.count("<img ") == 5  # two sweeps, Figures 3 and 4, mixed pairs
    assert "Figure 4: mixing by HTM over training (table1/cifar100_htm)" in page
    assert "From htm0." in page
    assert "2 of 8 rows have a finished run" in page and "6 of 8" not in page
    assert "WARNING" not in page and "generated stand-ins" not in page


def test_page_names_what_is_missing_and_unused(page: str):
    assert "No value has a finished run; make sweep-kappa trains them." in page
    assert "is not a run folder: it has no config.yaml" in page
    assert re.search(r"<th>mine</th>\s*<td>finished</td>", page)


def test_texts_of_runs_are_escaped(page: str):
    assert "<script>" not in page and "&lt;script&gt;alert(1)" in page
    assert "<b>CPU</b>" not in page


def test_folder_without_runs_of_the_paper_is_reported(tmp_path: Path):
    write_run(tmp_path, config_of(), 0, "mine")
    page = write_page(Settings(outputs=str(tmp_path))).read_text()
    assert "No run folder has the configuration of a row at full scale." in page
    assert page.count("Accuracies are top-1 in percent") == 1


@pytest.mark.slow
def test_report_writes_its_formats_and_prints_the_page_last(
    outputs: Path, page: str, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["report.py", "--outputs", str(outputs)])
    report.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == str(outputs / "report/index.html") and len(lines) == 2
    names = {path.name for path in (outputs / "report").iterdir()}
    assert {f"table{n}.{kind}" for n in range(1, 6) for kind in ("md", "csv")} <= names
    assert {"sweep-tau.png", "sweep-tau.pdf", "figure4.png", "mixed_pairs.pdf"} <= names
    assert "sweep-rho.png" in names and "sweep-kappa.png" not in names
    assert (outputs / "report/index.html").read_text() == page  # byte for byte


def test_smoke_scale_is_marked(tmp_path: Path):
    settings = Settings(scale="smoke", outputs=str(tmp_path))
    points = {x.label: x.config for x in points_of(studies_of("table1"), settings)}
    run = write_run(tmp_path / "smoke", points[HTM])
    for suffix in ("png", "pdf"):
        Image.new("RGB", (60, 30)).save(run / f"mixed_pairs.{suffix}")
        (run / f"mixed_samples.{suffix}").write_text("no picture")
    report = tmp_path / "smoke" / "report"
    report.mkdir()
    (report / "figure3.png").touch()  # of an earlier report
    page = write_page(settings).read_text()
    assert "WARNING. SMOKE SCALE" in page and "(4 batches of 8 images" in page
    assert "has no saliency.png and .pdf" in page
    assert "mixed_samples.png: not readable: " in page
    assert not (report / "figure3.png").exists() and not (report / "figure4.pdf").exists()
    assert Image.open(report / "mixed_pairs.png").size != (60, 30)  # below a mark


def test_sweep_is_drawn_beside_its_baseline_and_the_paper(
    outputs: Path, tmp_path: Path, drawn_texts: dict[str, list[str]]
):
    sweep, path = result(outputs, "sweep-tau"), tmp_path / "tau.png"
    caption = _draw_sweep(sweep, read_runs(outputs), Settings(), path)
    assert caption.endswith(" Not run: 0, 0.5, 1.5, 3, 4, inf.")
    assert {"1", "2", "tau", "baseline (n = 2)", "the paper: 83.56"} <= {*drawn_texts["tau"]}


def test_reports_that_cannot_be_written_are_refused(tmp_path: Path, configs: Configs):
    with pytest.raises(UserError, match="there is no such folder of runs"):
        write_page(Settings(outputs=str(tmp_path / "nowhere")))
    write_run(tmp_path, configs[HTM], 0, "report")
    with pytest.raises(UserError, match="is the folder of a run, the report needs this name"):
        write_page(Settings(outputs=str(tmp_path)))
