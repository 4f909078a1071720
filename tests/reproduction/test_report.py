"""Pictures and the report of a run, look.py, and the pages of the paper's tables."""

import contextlib
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from PIL import Image

from reproduction.identity import run_hash
from reproduction.reporting.pictures import chosen_pairs
from tests.programs import (
    ROOT,
    SMALL,
    Run,
    assert_refused,
    assert_succeeded,
    cells,
    config_of,
    overrides_of,
    script,
    trained,
)
from tests.reproduction.finished import write

pytestmark = pytest.mark.usefixtures("here")
HTM = "experiment=table1/cifar100_htm"
ROWS = {
    "base": ["experiment=table1/cifar100_baseline"],
    "htm": [HTM],
    "tau1": [HTM, "augmentation.htm.tau=1"],
    "split": [HTM, "dataset.validation=0.1"],
    "other": [],
}


def finished(model: Run, row: str, seed: int = 0, **summary: object) -> Path:
    """Writes a run of a row of the paper, by whose hash it is found, with another one's summary."""
    config = replace(config_of(ROWS[row]), seed=seed)
    folder = write(model, f"{row}-s{seed}-{run_hash(config)}", {}, seed, **summary)
    (folder / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    return folder


def write_rows(model: Run) -> None:
    """Writes runs of rows of the paper, and one that is of none."""
    for seed in range(3):
        finished(model, "base", seed, top1_last=80.0 + seed)
        htm = finished(model, "htm", 2 - seed, top1_last=85.0 - 2 * seed, loss=seed**2)
    Image.new("RGB", (60, 30)).save(htm / "saliency.png")  # of seed 0
    (htm / "mixed_samples.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    (htm / "report.md").touch()
    finished(model, "tau1", 0)
    finished(model, "tau1", 1)
    finished(model, "tau1", 2, status="failed")
    finished(model, "base", 7, top1_last=89.0)  # of none of the seeds
    finished(model, "other")
    Path("outputs/notes").mkdir()


@pytest.fixture(scope="module")
def report(model: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the report of these runs."""
    with contextlib.chdir(tmp_path_factory.mktemp("page")):
        write_rows(model)
        for study in ("table1", "table2", "sweep-tau"):
            assert_succeeded(script("reproduce", study, "--no-train"))
        return Path("outputs/report").absolute()


@pytest.fixture(scope="module")
def page(report: Path) -> str:
    """That of Table 1."""
    return (report / "table1.md").read_text()


def test_a_page_shows_what_was_run(report: Path, page: str):
    assert page.index("83.00") < page.index("![CIFAR-100]")
    assert "WARNING" not in page
    assert "6 finished runs, " in page
    assert {path.stem for path in report.glob("*.md")} == {"table1", "sweep-tau"}
    pictures = re.findall(r"!\[.*\]\((\S+)\)", page)
    assert len(pictures) == 1
    assert all((report / picture).exists() for picture in pictures)
    assert re.search(r"\]\(\.\./base-s2-\w+/report\.md\)", page)


def test_a_row_without_a_run_has_its_printed_value(page: str):
    """Table 1 has eight rows, of which two have runs."""
    main, _, _ = page.partition("## Other outcomes")
    rows = cells(main)
    assert [row[1] for row in rows].count("0") == 6
    (untrained,) = [row for row in rows if "97.78" in row]
    assert untrained[:2] == ["CCT-7/3x1(1500) + VTM", "0"]


def test_the_numbers_of_a_table_are_beside_the_page(report: Path, page: str):
    numbers = pd.read_csv(report / "table1.csv")
    top1 = numbers[numbers.outcome == "top1"].set_index("row")
    row = top1.loc["cifar100_htm"]
    assert row["mean"] == pytest.approx(83)
    assert row.difference == pytest.approx(2)
    assert row.printed == 83.56
    assert set(numbers.outcome[numbers.p.notna()]) == {"top1"}
    assert top1.loc["cifar100_vtm"].n == 0
    assert set(top1.column) == {"CIFAR-10", "CIFAR-100"}
    assert page.count("\n## Other outcomes\n") == 1
    assert re.search(r"\| CIFAR-100 .* loss \[nats\] ", page)
    assert re.search(r"\| CIFAR-100 .* top-5 \[%\] ", page)


def test_the_papers_value_is_a_row_of_its_sweep_and_not_compared_with_itself(report: Path):
    sweep = pd.read_csv(report / "sweep-tau.csv")
    point = sweep[(sweep["augmentation.htm.tau"] == 2) & (sweep.outcome == "top1")]
    assert point.n.tolist() == [3]
    assert point.compared_with.isna().all() or point.pairs.isna().all()


def test_the_papers_values_are_not_drawn_beside_a_validation_split(
    model: Run, drawn_texts: dict[str, list[str]]
):
    """The paper prints accuracies of the test set."""
    finished(model, "split", val_top1_last=70.0)
    finished(model, "htm")
    assert_succeeded(script("reproduce", "table1", "--no-train", "dataset.validation=0.1"))
    assert not Path("outputs/report/table1.md").exists()  # which is of the paper's runs alone
    (name,) = [name for name in drawn_texts if name.startswith("table1")]
    assert any(text.startswith("validation top-1") for text in drawn_texts[name])
    assert "the paper's" not in drawn_texts[name]
    assert_succeeded(script("reproduce", "table1", "--no-train"))
    assert "the paper's" in drawn_texts["table1-2"]
    assert Path("outputs/report/table1.md").exists()


DRAWN = overrides_of("accuracy.svg mixed_samples.svg mixed_pairs.png saliency.png")
MIXING = ("augmentation=[htm]", "augmentation.htm.tau=inf", "augmentation.htm.rho=0")


def test_a_run_draws_its_pictures_and_describes_them(drawn_texts: dict[str, list[str]]):
    run = trained(SMALL, MIXING, "augmentation=[htm,vtm]", draws=True)
    texts = drawn_texts["accuracy"]
    best = max(run.summary["log"], key=lambda line: line["top1"])  # the first of equal ones
    assert "best: {top1:.2f} %, epoch {epoch}".format(**best) in texts
    assert "held-out top-1 [%]" in texts
    titles = " ".join(drawn_texts["mixed_pairs"])
    assert titles.index("median of mixed") < titles.index("most mixed")
    replaced = re.findall(r"mixed: (\d+) of 64 tokens", titles)
    assert int(replaced[0]) <= int(replaced[1])
    nats = re.findall(r"entropy ([\d.]+) nats", " ".join(drawn_texts["saliency"]))
    assert len(nats) == 2  # HTM is at the last block
    for entropy in nats:
        assert 0 < float(entropy) <= 4.16
    page = (run.path / "report.md").read_text()
    assert "top-1 {top1_last:.2f} %".format(**run.summary) in page
    for method in ("HTM gives easy samples", "VTM lets a block attend"):
        assert method in page
    for name in DRAWN:
        assert f"]({name})" in page
        assert (run.path / name).exists()


def test_a_typical_pair_is_the_median_of_those_that_are_mixed():
    mix: Any = SimpleNamespace(mask=torch.ones(5, 4).tril(-1))  # 0 to 4 tokens
    assert chosen_pairs(mix) == {"median of mixed": 2, "most mixed": 4}


def test_a_report_says_why_a_picture_is_missing(drawn_texts: dict[str, list[str]]):
    """Of two layers, with a validation split and epochs that mix nothing."""
    overrides = overrides_of("""
        augmentation=[htm] augmentation.htm.tau=0 augmentation.htm.layer=[0,1]
        augmentation.off_epoch=1 dataset.validation=0.2
    """)
    run = trained(SMALL, overrides, draws=True)
    assert "validation top-1 [%]" in drawn_texts["accuracy"]
    page = (run.path / "report.md").read_text()
    assert "mixed_pairs.png is not drawn: the trained model mixes none of" in page
    assert "](saliency.png)" in page
    assert not (run.path / "mixed_pairs.png").exists()


def shares(text: str, title: str) -> dict[str, float]:
    """The rows of a table of look.py in percent, by their first cell."""
    _, _, rest = text.partition(f"| {title} ")
    table, _, _ = rest.partition("\n\n")
    return {name: float(cell.rstrip("%")) for name, cell in cells(table)}


def test_look_counts_what_a_training_step_mixes(here: Path):
    """The run neither learns nor drops out, so its epoch and the counts use equal weights."""
    still = ("model.drop_path=0", "recipe.lr=1e-20", "recipe.min_lr=0", "recipe.warmup_lr=0")
    overrides = (SMALL, still, overrides_of("dataset.limit=20 recipe.epochs=1 recipe.log_every=1"))
    run = trained(overrides, "augmentation=[mixup,htm]", "augmentation.htm.tau=inf")
    (step,) = run.steps
    result = script("look", "run=outputs/mine")
    assert_succeeded(result)
    easy = [*shares(result.out, "easy samples").values()]
    assert easy == sorted(easy)
    assert easy[-1] == 100
    by_rho = shares(result.out, "replaced tokens of the easy samples of this run")
    assert list(by_rho.values()) == sorted(by_rho.values(), reverse=True)
    own = by_rho["0.02"]  # 1.28 / 64 tokens
    assert own == pytest.approx(
        100 * step["mixed_tokens"] * step["mixed_samples"] / 20 / 64, abs=0.1
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("[!_]*.py")), ids=lambda x: x.stem)
def test_every_script_starts_as_a_module(path: Path):
    assert_succeeded(script(path.stem, "--help", apart=True), "usage:")


def test_look_refuses_a_run_without_htm():
    trained(SMALL, "augmentation=[]", "recipe.max_steps=1", name="plain", root=".")
    assert_refused(script("look", "plain"), "without htm")
