"""Studies as files: what they plan, and that reproduce.py trains each run once and resumes."""

import re
import shutil
from contextlib import chdir
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from tests.conftest import of_each
from tests.programs import (
    ROOT,
    Overrides,
    Run,
    assert_refused,
    assert_succeeded,
    report_name,
    script,
    snapshot,
    statuses,
)

pytestmark = pytest.mark.usefixtures("here")
RESULTS = ROOT / "results"
STUDIES = sorted(path.stem for path in RESULTS.glob("*.yaml"))
ALL = 42  # runs of one seed
SMALL = """
  - model.embed_dim=16
  - dataset.limit=50
  - dataset.eval_limit=30
  - recipe.batch_size=25
  - recipe.epochs=2
  - recipe.log_every=1
  - device=cpu
"""
STUDY = f"""
title: Three
overrides:{SMALL}
rows:
  plain: ["augmentation=[]"]
  htm: {{overrides: ["augmentation=[htm]"], against: plain}}
  random: {{overrides: ["augmentation=[htm]", augmentation.htm.detector=random], against: plain}}
seeds: 1
first_seed: 4
"""


def listed(*overrides: Overrides) -> list[dict[str, str]]:
    """The runs of a plan, as the dry run lists them."""
    result = script("reproduce", overrides, "dry_run=1")
    assert_succeeded(result)
    *lines, last = result.out.rstrip().splitlines()
    assert last.startswith(f"{len(lines)} run")
    found = []
    for line in lines:
        task, row, status, folder, seed = re.fullmatch(
            r"(\d+): (\S*) (.+): (\S+-s(\d+)-\S+|\S+)", line
        ).groups()
        found.append({"task": task, "row": row, "status": status, "folder": folder, "seed": seed})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["full", "smoke"])
def test_each_row_of_the_paper_is_planned_once_and_equal_rows_share_a_run(scale: str):
    runs = listed("all", "seeds=1", f"scale={scale}")
    labels = {run["row"] for run in runs}
    assert len(labels) == len(runs) <= ALL
    assert len({run["folder"] for run in runs}) == len(runs)
    if scale == "full":
        assert len(runs) == ALL
        assert "table1/cifar100_htm" in labels
        assert "sweep-rho/rho=0.01" in labels
        for shared in ("table3/attention", "table4/full", "table5/mixup_cutmix_htm"):
            assert shared not in labels
        assert "sweep-tau/tau=2" not in labels
        assert "table4/without_tokens" not in labels


@pytest.mark.parametrize("name", of_each(STUDIES, ["digits_fit"]))
def test_a_study_is_planned_seed_by_seed_with_its_rows(name: str):
    path = RESULTS / f"{name}.yaml"
    content = yaml.safe_load(path.read_text())
    expected = []
    for seed in range(content["seeds"]):
        for row in content["rows"]:
            expected.append((f"{path.stem}/{row}", str(seed)))
    assert [(run["row"], run["seed"]) for run in listed(str(path))] == expected


@pytest.mark.slow
def test_tables_have_one_name_exactly_if_they_are_of_the_same_rows_and_seeds():
    """That of the paper's whole studies has no hash."""
    one = yaml.safe_dump({"title": "Mine", "rows": {"low": ["recipe.lr=0.001"]}})
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "sweep-rho.yaml").write_text(one)
    Path("a/high.yaml").write_text(one.replace("0.001", "0.002"))
    decay, drop = "recipe.weight_decay=0.1", "model.drop_path=0.3"
    names = [
        report_name("sweep-rho", None, "full"),
        report_name("sweep-rho", 1, "full"),
        report_name("sweep-rho/baseline", None, "full"),
        report_name("sweep-rho", None, "full", decay),
        report_name("a/sweep-rho.yaml", 3, "full"),
        report_name("b/sweep-rho.yaml", 3, "full"),
        report_name("a/high.yaml", 3, "full"),
        report_name("a/sweep-rho.yaml", 1, "full"),
        report_name("a/sweep-rho.yaml", 1, "smoke"),
        report_name("a/sweep-rho.yaml", 3, "full", decay),
        report_name("a/sweep-rho.yaml", 3, "full", decay, drop),
    ]
    assert names[0] == "sweep-rho"
    assert len(set(names)) == len(names)
    assert report_name("a/sweep-rho.yaml", None, "full", "device=cpu") == names[4]
    assert report_name("a/sweep-rho.yaml", 3, "full", drop, decay) == names[-1]


def test_the_last_override_counts_and_a_scale_has_its_own_folder():
    overrides = ("table1/cifar100_htm", "scale=smoke")
    (plain,) = listed(overrides)
    (changed,) = listed(overrides, "recipe.epochs=3")
    assert changed["folder"].startswith("outputs/smoke/table1-cifar100_htm-")
    assert changed["folder"] != plain["folder"]


@pytest.mark.parametrize("stack", ["htm", "vtm"])
def test_at_smoke_scale_htm_mixes_all_if_the_command_leaves_it_in(stack: str):
    """The study has no HTM, or has it: what SET chooses counts."""
    rows = {"slow": ["recipe.lr=0.001"], "fast": ["recipe.lr=0.01"]}
    study = yaml.safe_load(STUDY) | {"rows": rows}
    Path("three.yaml").write_text(yaml.safe_dump(study))
    overrides = ("scale=smoke", f"augmentation=[{stack}]", "recipe.max_steps=1")
    result = script("reproduce", "three.yaml", overrides)
    assert_succeeded(result, "2 of 2 runs")
    runs = list(Path("outputs/smoke").glob("three-*"))
    assert len(runs) == 2
    for run in runs:
        mixing = Run(run).config["augmentation"]["htm"]
        if stack == "vtm":
            assert mixing is None
        else:
            assert mixing["tau"] == np.inf
            assert mixing["rho"] == 0


SWEPT = """
rows:
  slow: [recipe.lr=1e-3, 'recipe.weight_decay=0,0.1']
  fast: {overrides: [recipe.lr=1e-2, 'recipe.weight_decay=0,0.1'], against: slow}
"""


def write_study(name: str, changes: str) -> None:
    """Writes the study with other entries."""
    content = yaml.safe_load(STUDY) | yaml.safe_load(changes)
    Path(name).write_text(yaml.safe_dump(content, sort_keys=False))


@pytest.mark.slow
def test_each_run_of_each_sweep_is_a_row_and_sweeps_are_compared_value_by_value():
    write_study("two.yaml", f"seeds: 2\n{SWEPT}")
    planned = listed("two.yaml")
    assert len({run["row"] for run in planned}) == 4
    assert len(planned) == 8
    assert len({run["folder"] for run in planned}) == 8
    assert_succeeded(script("reproduce", "two.yaml", "seeds=1"))
    (path,) = Path("outputs/report").glob("two-*.csv")
    rows = pd.read_csv(path).query("outcome == 'top1'")
    assert rows["recipe.weight_decay"].tolist() == [0, 0.1, 0, 0.1]
    top1 = rows.set_index(["row", "recipe.weight_decay"])
    for decay in (0, 0.1):
        slow = top1.loc["slow", decay]
        fast = top1.loc["fast", decay]
        assert fast["difference"] == pytest.approx(fast["mean"] - slow["mean"])
        assert fast["compared_with"] == f"slow,weight_decay={decay:g}"
        assert pd.isna(slow["compared_with"])


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ("rows: {htm: {overrides: [], against: nothing}}", "against=nothing"),
        ("rows: {htm: {overrides: [], against: htm}}", "against=htm"),
        (f"{SWEPT}  a: {{overrides: [], against: slow}}", "a.against=slow: is a sw"),
        (f"{SWEPT}  a: {{overrides: ['recipe.lr=1,2'], against: slow}}", "against"),
        ("tested: accuracy", "tested"),
        ("rows: {}", "rows"),
        ("rows: {a/b: []}", "a/b"),
        ("row: {}", "row"),
        ("seeds: 0", "seeds"),
        ("overrides: [recipe.lrr=1]", "lrr"),
        ("overrides: [seed=3]", "seed"),
        ("rows: {none: [+devices=2]}", "devices"),
        ("rows: {none: {override: []}}", "override"),
    ],
)
def test_a_study_that_is_wrong_is_refused_in_a_line(changes: str, part: str):
    write_study("mine.yaml", changes)
    assert_refused(script("reproduce", "mine.yaml"), part)
    assert list(snapshot()) == ["mine.yaml"]


def test_two_rows_of_one_name_are_refused():
    Path("mine.yaml").write_text(STUDY.replace("  htm:", "  plain:"))
    assert_refused(script("reproduce", "mine.yaml"), "plain")
    write_study("mine.yaml", "rows: {lr=1: [recipe.epochs=3], a: ['recipe.lr=1,2']}")
    assert_refused(script("reproduce", "mine.yaml"), "2 of them are called lr=1")


def reproduce(*overrides: Overrides, status: int = 0) -> str:
    Path("three.yaml").write_text(STUDY)
    result = script("reproduce", "three.yaml", overrides)
    assert result.status == status, result.err
    return result.out + result.err


def folders() -> dict[str, Run]:
    names = ("plain", "htm", "random")
    return {name: Run(*Path("outputs").glob(f"three-{name}-s4-*")) for name in names}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of the study."""
    with chdir(tmp_path_factory.mktemp("whole")):
        text = reproduce("objective=val_loss")  # no setting, so folders and files have their names
        assert "3 of 3 runs are finished" in text
        assert re.search(r"\| random +\| +1 \|", text)
        return Path("outputs").absolute()


def test_each_run_of_a_study_is_trained_once_and_its_table_written(whole: Path):
    shutil.copytree(whole, "outputs")
    trained = folders()
    for run in trained.values():
        assert run.checkpoint()["step"] == 4
    seconds = trained["htm"].summary["seconds"]
    (path,) = Path("outputs/report").glob("three-*.csv")
    numbers = pd.read_csv(path)
    assert set(numbers.n) == {1}
    assert set(numbers.row) == {"plain", "htm", "random"}
    first = numbers[numbers.outcome == "top1"].set_index("row")
    top1 = {name: run.summary["top1_last"] for name, run in trained.items()}
    assert first["mean"].to_dict() == pytest.approx(top1)
    htm = trained["htm"].path  # an equal run counts under any name with its hash
    htm.rename(htm.with_name(htm.name.replace("three", "other")))
    assert "3 of 3 runs are finished" in reproduce()
    renamed = Run(htm.with_name(htm.name.replace("three", "other")))
    assert renamed.summary["seconds"] == seconds
    assert statuses() == ["finished"] * 3
    assert [run["status"] for run in listed("three.yaml")] == ["finished"] * 3


def test_a_damaged_file_is_named_before_any_run_starts(whole: Path):
    shutil.copytree(whole, "outputs")
    folder = folders()["plain"].path
    (folder / "config.yaml").write_text("x")
    (line,) = reproduce(status=2).splitlines()
    assert str(folder) in line


@pytest.mark.slow
def test_a_table_of_the_paper_trains_at_smoke_scale():
    narrow = ("model.embed_dim=16", "model.depth=4", "model.image_size=20", "device=cpu")
    result = script("reproduce", "table3", "scale=smoke", narrow)
    assert_succeeded(result, "4 of 4 runs are finished")
    (page,) = Path("outputs/smoke/report").glob("table3-*.md")
    assert str(page) in result.out
    assert "4 finished runs" in page.read_text()
    first = Run(*Path("outputs/smoke").glob("table3-baseline-*"))
    right = 40 * first.epochs[-1]["top1"] / 100  # of 40 held-out images
    assert right == pytest.approx(round(right))
