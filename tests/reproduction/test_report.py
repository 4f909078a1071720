"""Pictures and the report of a run, look.py, and the page of the paper's tables."""

import base64
import contextlib
import html
import json
import re
import shutil
import subprocess
import warnings
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest
import yaml
from PIL import Image

from tests.doors import ROOT, SMALL, Run, config_of, evaluate, script, train
from tests.images import write_images
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
    folder = write(model, name, {}, seed, **summary)
    row = ROWS[name.partition("-")[0]]
    config = asdict(config_of(*row)) | {"seed": seed}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def write_rows(trained: Run) -> None:
    """Writes runs of rows of the paper, and one that is of none."""
    for seed in range(3):
        finished(trained, f"base-{seed}", seed, top1_last=80.0 + seed)
        run = finished(trained, f"htm-{2 - seed}", 2 - seed, top1_last=85.0 - 2 * seed)
        failed = {"status": "failed", "error": "<script>alert(1)</script>"} if seed == 2 else {}
        finished(trained, f"tau1-{seed}", seed, **failed)
    for name in ("saliency", "mixed_samples"):
        Image.new("RGB", (60, 30)).save(run / f"{name}.png")
    (run / "report.md").touch()
    finished(trained, "base-7", 7, top1_last=89.0)  # of none of the seeds
    finished(trained, "other-0")
    Path("outputs/notes").mkdir()
    ms = {"attention": [1, 2, 3], "gradient": [10, 20, 30], "random": [0.5, 1, 2]}
    Path("outputs/report").mkdir()
    Path("outputs/report/latency.json").write_text(json.dumps({"about": "here", "ms": ms}))


@pytest.fixture(scope="module")
def report(trained: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the report of these runs."""
    with contextlib.chdir(tmp_path_factory.mktemp("page")):
        write_rows(trained)
        result = script("report")
        assert result.status == 0 and "outputs/report/index.html" in result.out, result.err
        return Path("outputs/report").absolute()


def test_the_page_begins_with_what_was_run(report: Path):
    page = (report / "index.html").read_text()
    assert "83.00 +/- 2.00" in page
    assert "CCT-7/3x1(1500) + HTM + VTM" in page
    assert "WARNING" not in page
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert ">86.57</td>" in page  # parameters, counted
    assert ">87.34</td>" in page
    assert page.index("<img") < page.index("<table") < page.index("ResNet18")
    begun = re.findall(r"<h3><a href=\"#(\S+)\">", page)
    assert begun == [
        "table1",
        "table3",
        "table4",
        "table5",
        "sweep-tau",
        "sweep-rho",
        "sweep-kappa",
    ]
    images = [base64.b64decode(x) for x in re.findall(r"base64,([^\"]+)", page)]
    assert len(images) == len(begun) + 2  # and Figures 3 and 4
    assert "6 of 24 planned runs are finished" in page  # of Table 1
    assert 'href="../htm-0/saliency.png"' in page
    assert 'href="../base-2/"' in page
    assert "Latency: here" in page  # beside Table 3
    assert "20.0 (10.0 to 30.0)" in page
    folded = re.findall(r"(?s)<summary>Rows without a run</summary>(.*?)</details>", page)
    assert any("ResNet18" in part for part in folded)
    assert not any(">83.00 +/- 2.00" in part for part in folded)
    numbers = pd.read_csv(report / "table1.csv")
    top1 = numbers[numbers.outcome == "top1"].set_index("row")
    row = top1.loc["cifar100_htm"]
    assert row["mean"] == pytest.approx(83)
    assert row.difference == pytest.approx(2)
    assert row.printed_difference == pytest.approx(83.56 - 82.87)
    assert len(top1) == 8 + 28
    assert top1.loc["cifar100_vtm"].n == 0
    assert {*top1.column} == {"CIFAR-10", "CIFAR-100"}
    (text,) = (x for x in page.split("<h2") if 'id="table1"' in x)
    assert {"CIFAR-100: held-out loss", "CIFAR-100: top-5"} <= {*re.findall("<h4>(.*?)</h4>", text)}
    sweep = pd.read_csv(report / "sweep-tau.csv")
    point = sweep[(sweep["augmentation.htm.tau"] == 2) & (sweep.outcome == "top1")]
    assert point.n.tolist() == [3]  # the paper's own value, which is not compared with itself
    assert point.compared_with.isna().all() or point.pairs.isna().all()


def test_only_rows_that_are_to_be_trained_count_as_rows_without_a_run(report: Path):
    """Table 1 has eight of them, of which two have runs; it quotes 28 others."""
    assert "rows without a finished run: 6" in (report / "table1.md").read_text()


def test_the_papers_values_are_not_drawn_beside_a_validation_split(
    trained: Run, drawn_texts: dict[str, list[str]]
):
    """The paper prints accuracies of the test set."""
    split = "dataset.validation=0.1"
    for name, words, more in (
        ("split", [HTM, split], {"val_top1_last": 70.0}),
        ("whole", [HTM], {}),
    ):
        folder = write(trained, name, {}, **more)
        (folder / "config.yaml").write_text(yaml.safe_dump(asdict(config_of(*words))))
    assert script("report", split).status == 0
    (name,) = (name for name in drawn_texts if name.startswith("table1"))
    assert any(text.startswith("validation top-1") for text in drawn_texts[name])
    assert "the paper's" not in drawn_texts[name]
    assert script("report").status == 0
    assert "the paper's" in drawn_texts["table1-CIFAR-100"]


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_has_no_horizontal_bar(report: Path, width: int):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("opens the page in chromium, which is not installed")
    page = (report / "index.html").read_text().replace("<details", "<details open")
    frame = f'<iframe id="page" width="{width}" height="900" srcdoc="{html.escape(page)}"></iframe>'
    measure = (
        "onload = () => { const page = document.getElementById('page').contentDocument;"
        "document.title = `${page.documentElement.scrollWidth} ${page.images.length}` }"
    )
    Path("frame.html").write_text(f"<title></title>{frame}<script>{measure}</script>")
    words = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
    more = ("--disable-background-networking", "--user-data-dir=profile", "--dump-dom")
    address = Path("frame.html").absolute().as_uri()
    command = [chromium, *words, *more, "--window-size=1400,1000", address]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    seen, images = re.search(r"<title>(\d+) (\d+)</title>", found.stdout).groups()  # type: ignore
    assert int(images) == 9
    assert int(seen) <= width


WRONG = [
    ("report", "--outputs", "nowhere"),
    ("report", "--scale", "huge"),
    ("report", "--x"),
    ("report", "--results", "results", "recipe.lr=1"),
    ("publish", "x", "y.yaml", "recipe.lr=1"),
    ("publish", "x", "nowhere.yaml"),
    ("publish", "x", "lines.jsonl"),
]


@pytest.mark.parametrize("words", WRONG)
def test_a_report_that_cannot_be_made_is_refused_in_a_line(words: tuple[str, ...]):
    Path("lines.jsonl").write_text("{}\n{}\n")
    result = script(*words)
    assert (result.status, len(result.lines)) == (2, 1)
    assert words[-1].strip("-") in result.err


DRAWN = ("accuracy", "mixed_samples", "mixed_pairs", "saliency")
MIXING = ("augmentation=[htm]", "augmentation.htm.tau=inf", "augmentation.htm.rho=0")


def test_a_run_draws_its_pictures_byte_for_byte_again(
    here: Path, drawn_texts: dict[str, list[str]]
):
    for name in ("one", "other"):
        assert train(*SMALL, *MIXING, f"name={name}", draws=True).status == 0
    one, other = (
        {x.name: x.read_bytes() for x in (here / "outputs" / name).glob("*.p[nd][gf]")}
        for name in ("one", "other")
    )
    assert one == other
    assert {*one} == {f"{x}.{y}" for x in DRAWN for y in ("png", "pdf")}
    summary = Run("outputs/one").summary
    texts = drawn_texts["accuracy"]
    best = max(summary["log"], key=lambda line: line["top1"])  # the first of equal ones
    assert f"best: {best['top1']:.2f} %, epoch {best['epoch']}" in texts
    assert {"held-out top-1 [%]", "1", "2"} <= {*texts}
    assert not {"1.2", "1.4"} & {*texts}
    assert any(text.startswith("mixed: ") for text in drawn_texts["mixed_pairs"])
    nats = re.findall(r"entropy ([\d.]+) nats", " ".join(drawn_texts["saliency"]))
    assert len(nats) == 2  # HTM is at the last block
    assert all(0 < float(x) <= 4.16 for x in nats)
    page = Path("outputs/one/report.md").read_text()
    assert page.startswith("# one\n")
    assert f"top-1 {summary['top1_last']:.2f} %" in page
    assert all(f"]({name}.png)" in page for name in DRAWN)


def test_a_report_says_why_a_picture_is_missing(here: Path):
    words = (*SMALL, "augmentation=[htm]", "augmentation.htm.tau=0", "name=mine")
    assert train(*words, "recipe.max_steps=2", draws=True).status == 0
    page = Path("outputs/mine/report.md").read_text()
    assert "mixed_pairs.png is not drawn: the trained model mixes none of" in page
    assert "](saliency.png)" in page
    assert not Path("outputs/mine/mixed_pairs.png").exists()


def test_class_names_may_hold_anything(here: Path):
    root = write_images(here / "images", ["a\tb", "$x_{1}$", "c" * 60], train=8, held_out=4)
    words = [x for x in SMALL if not x.startswith("dataset.")]
    data = ("dataset=image_folder", f"dataset.root={root}", "name=mine")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Glyph")
        assert train(*words, *data, *MIXING, draws=True).status == 0
        result = evaluate("run=outputs/mine", "predictions=x.csv", draws=True)
    assert result.status == 0
    assert Path("outputs/mine/mixed_pairs.png").stat().st_size > 10_000
    assert Path("outputs/mine/evaluation-last-confusion.png").stat().st_size > 5_000


def shares(text: str, title: str) -> dict[str, list[float]]:
    """The rows of a table of look.py in percent, by their first cell."""
    rows = text.partition(f"| {title} ")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[x.strip() for x in row.split("|")[1:-1]] for row in rows]
    return {first: [float(x.rstrip("%")) for x in others] for first, *others in cells}


def test_look_counts_what_a_training_step_mixes(here: Path):
    """The run neither learns nor drops out, so its epoch and the counts use equal weights."""
    still = ("model.drop_path=0", "recipe.lr=1e-20", "recipe.min_lr=0", "recipe.warmup_lr=0")
    words = (*SMALL, *still, "dataset.limit=20", "recipe.epochs=1", "recipe.log_every=1")
    stack = ("augmentation=[mixup,htm]", "augmentation.htm.layer=[0,1]")
    assert train(*words, *stack, "augmentation.htm.tau=[0.1,inf]", "name=mine").status == 0
    (step,) = Run("outputs/mine").steps
    result = script("look", "run=outputs/mine", "--batches=1")
    assert result.status == 0, result.err
    _, first, second = result.out.split("\nlayer ")
    assert "None is easy" in first
    assert "None is easy" not in second
    easy = shares(second, "tau")["easy samples"]
    assert easy == sorted(easy)
    assert easy[-1] == 100 == 5 * step["mixed_samples/1"]
    by_rho = shares(second, "rho")
    for row in by_rho.values():
        assert row == sorted(row, reverse=True)
        assert row[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("[!_]*.py")), ids=lambda x: x.stem)
def test_every_script_starts_as_a_module(path: Path):
    result = script(path.stem, "--help", apart=True)
    assert result.status == 0 and len(result.out.splitlines()) > 2, result.err


@pytest.mark.parametrize(
    "words",
    [("nowhere",), ("plain", "--batches", "0"), ("plain",)],
)
def test_look_refuses_in_a_line(words: tuple[str, ...]):
    plain = ("augmentation=[]", "recipe.max_steps=1", "output_root=.", "name=plain")
    assert train(*SMALL, *plain).status == 0
    result = script("look", *words)
    assert (result.status, len(result.lines)) == (2, 1)
    assert words[-1] in result.err or "without htm" in result.err
