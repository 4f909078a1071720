"""Tables of any runs and of studies: paired statistics, what is shown, a published line."""

import json
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy.stats import ttest_1samp

from reproduction.studies.plots import margins
from tests.programs import (
    SMALL,
    Run,
    assert_refused,
    assert_succeeded,
    cells,
    line_of,
    script,
    train,
    trained,
)
from tests.reproduction.finished import write

pytestmark = pytest.mark.usefixtures("here")
TAU = "augmentation.htm.tau"
RHO = "augmentation.htm.rho"
Settings = Mapping[str, Any]
approx = partial(pytest.approx, abs=1e-9)


def several(model: Run, values: Mapping[float, Mapping[int, float]], key: str = TAU) -> None:
    """Writes runs: value of a key -> seed -> accuracy."""
    for value, by_seed in values.items():
        for seed, top1 in by_seed.items():
            write(model, f"{value}-{seed}", {key: value}, seed, top1_last=top1)


def table(*overrides: str) -> tuple[pd.DataFrame, str]:
    """The numbers of the runs in outputs/, and the table as text."""
    result = script("runs", "outputs", "--csv", "numbers.csv", overrides)
    assert_succeeded(result)
    numbers = pd.read_csv("numbers.csv")
    return numbers.rename(columns=lambda name: name.rpartition(".")[2]), result.out


def newest(pattern: str) -> Path:
    """The newest file of the report with such a name."""
    return max(Path("outputs").rglob(f"report/{pattern}"), key=os.path.getmtime)


def holm(p: Mapping[Any, float]) -> dict[Any, float]:
    """The adjusted p-values of Holm (1979)."""
    adjusted: dict[Any, float] = {}
    largest = 0.0
    for place, name in enumerate(sorted(p, key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - place) * p[name]))
        adjusted[name] = largest
    return adjusted


def check(row: Any, ours: Mapping[int, float], base: Mapping[int, float]) -> float:
    """Compares a row with its statistics; returns p."""
    gaps = [value - base[seed] for seed, value in ours.items() if seed in base]
    expected = ttest_1samp(gaps, 0)
    low, high = expected.confidence_interval()
    p = float(expected.pvalue)
    assert row.n == len(ours)
    assert row.mean == approx(fmean(ours.values()))
    assert row.std == approx(stdev(ours.values()))
    assert row.pairs == len(gaps)
    assert row.difference == approx(fmean(gaps))
    assert row.below == sum(np.less(gaps, 0))
    assert row.low == approx(low)
    assert row.high == approx(high)
    assert row.p == pytest.approx(p, abs=1e-12)
    return p


def test_rows_have_the_paired_statistics_of_their_seeds(model: Run):
    """Seeds differ by more than rows, and each row lacks other seeds."""
    rng = np.random.default_rng(10)
    of_seed = rng.normal(80, 3, 9)
    gains = {1.0: 0.0, 2.0: 0.8, 3.0: 0.5, 4.0: 0.4, 5.0: 0.5}
    values: dict[float, dict[int, float]] = {}
    for place, (tau, gain) in enumerate(gains.items()):
        values[tau] = {}
        for seed in range(9):
            if seed != (3 * place) % 9:
                noise = rng.normal(0, 0.5)
                values[tau][seed] = float(of_seed[seed] + gain + noise)
    several(model, values)
    numbers, _ = table("--against", "tau=1")
    rows = {row.tau: row for row in numbers.itertuples()}
    p = {tau: check(rows[tau], values[tau], values[1]) for tau in (2.0, 3.0, 4.0, 5.0)}
    steps = [(len(p) - place) * value for place, value in enumerate(sorted(p.values()))]
    assert steps != sorted(steps)  # so that Holm's running maximum is seen
    for tau, value in holm(p).items():
        assert rows[tau].p_holm == pytest.approx(value, abs=1e-12)
    assert np.isnan([rows[1].pairs, rows[1].difference, rows[1].p]).all()
    assert rows[2].seconds == pytest.approx(model.summary["seconds"])


@pytest.mark.parametrize(
    ("ours", "pairs", "difference"),
    [
        ({0: 1.0, 1: 2.0}, 2, -1.5),
        ({5: 1.0}, 0, np.nan),
        ({0: 2.0, 1: 4.0, 2: 9.0}, 3, 0.0),
        ({0: 3.0, 1: 5.0, 2: 10.0}, 3, 1.0),
    ],
    ids=["two pairs", "none", "equal values", "equal differences"],
)
def test_no_test_of_fewer_than_three_pairs_or_of_equal_differences(
    model: Run, ours: dict[int, float], pairs: int, difference: float
):
    several(model, {1.0: {0: 2.0, 1: 4.0, 2: 9.0}, 2.0: ours})
    numbers, text = table("--against", "tau=1")
    assert "95 % interval" not in text
    row = numbers[numbers.tau == 2].iloc[0]
    assert row.pairs == pairs
    assert row.difference == pytest.approx(difference, nan_ok=True)
    assert pd.isna([row.p, row.p_holm, row.low]).all()


def test_the_newest_finished_run_of_a_seed_counts_and_the_others_are_named(model: Run):
    write(model, "old", {}, age=0, top1_last=50.0)
    write(model, "new", {}, age=1, top1_last=60.0)
    failure = {"status": "failed", "error": "CUDA | out\nof memory"}
    write(model, "failed", {}, age=2, top1_last=99.0, **failure)
    os.utime("outputs/old/summary.json", (2e9, 2e9))  # copied, or of a clock that was wrong
    write(model, "open", {}, seed=1, status="failed", error="step 3: the loss is nan")
    write(model, "broken", {}, seed=2, top5_last="high")
    Path("outputs/notes").mkdir()  # holds no run
    numbers, text = table()
    assert numbers.n.tolist() == [1]
    assert numbers["mean"].tolist() == [60]
    assert "step 3: the loss is nan" in text
    assert "not counted: open: failed" in text
    assert "notes" not in text
    assert "broken" in text


@pytest.mark.parametrize(
    ("variants", "heads"),
    [
        ([{TAU: 2.5}, {TAU: 0.5}, {TAU: np.inf}], ["tau"]),
        ([{"augmentation.htm": None}, {}], ["mixing"]),
        ([{"devices": 1}, {"devices": 2}], ["devices"]),
        (
            [{"dataset.limit": 60}, {"dataset.limit": 50, "model.depth": 3}],
            ["depth", "limit"],
        ),
        (
            [{TAU: 1, "recipe.epochs": 2}, {TAU: 2, "recipe.epochs": 28}],
            ["tau", "epochs"],
        ),
    ],
)
def test_the_columns_are_the_settings_that_differ(
    model: Run, variants: list[Settings], heads: list[str]
):
    for number, settings in enumerate(variants):
        write(model, str(number), settings, top1_last=60.0 + number)
    _, text = table()
    titles, *rows = cells(text)
    before_n = titles[: titles.index("n")]
    assert before_n == heads
    if heads == ["tau"]:
        values = [row[0] for row in rows]
        assert values == ["0.5", "2.5", "inf"]


def test_rows_show_what_was_easy_and_what_was_mixed(model: Run):
    write(model, "one", {}, easy_share=0.75, mixed_share=0.5)
    write(model, "other", {}, seed=1, easy_share=0.25, mixed_share=0.1)
    titles, row = cells(table()[1])
    shown = dict(zip(titles, row, strict=True))
    assert shown["easy [%]"] == "50.0"
    assert shown["mixed [%]"] == "30.0"


def test_a_plot_shows_what_differs(model: Run, drawn_texts: dict[str, list[str]]):
    write(model, "0", {"recipe.lr": 0.1})
    assert_refused(script("runs", "outputs", "--plot", "plot.svg"), "plot.svg")
    write(model, "1", {"recipe.lr": 0.2})
    assert_succeeded(script("runs", "outputs", "--plot", "plot.svg"))
    assert {"lr", "0.1", "0.2"} <= set(drawn_texts["plot"])


def test_the_bars_of_a_plot_are_95_percent_intervals():
    values = [80.0, 83.0, 81.5]
    lines = pd.DataFrame({"n": [3, 1], "std": [stdev(values), np.nan]})
    interval = ttest_1samp(values, 0).confidence_interval()
    assert margins(lines).tolist() == approx([interval.high - fmean(values), 0])


def reports() -> set[str]:
    """The names of the files of the reports of sweeps."""
    return {path.name for path in Path("outputs/report").iterdir()}


def test_a_sweep_ends_with_its_table_and_plot():
    sweep = ("-m", "augmentation.htm.tau=0.5,inf", "seed=0,1", SMALL, "augmentation=[htm]")
    result = train(sweep, "recipe.max_steps=2")
    assert_succeeded(result)
    (row,) = [row for row in cells(result.out) if row[0] == "inf"]
    assert row[1] == "2"  # seeds
    assert any("100.0" in cell for cell in row)  # all samples are mixed
    first = reports()
    assert {Path(name).suffix for name in first} == {".md", ".csv", ".svg"}
    page = newest("*.md").read_text()
    assert "`augmentation.htm.tau`" in page
    assert "`recipe.max_steps=2`" in page
    assert_succeeded(train(sweep, "recipe.max_steps=2", "resume=auto"))
    assert reports() == first


def test_runs_with_a_split_are_judged_on_it_and_the_test_set_stands_beside(model: Run):
    """Validation prefers tau=1, the test set tau=2: p and difference are those of validation."""
    gaps = [-9.0, -10.0, -10.5]
    for seed, gap in enumerate(gaps):
        for tau, val, test in ((1.0, 90.0, 60.0), (2.0, 90 + gap, 79.0)):
            results = {"val_top1_last": val, "selected_epoch": 1, "top1_last": test}
            settings = {TAU: tau, "dataset.validation": 0.1}
            write(model, f"{tau}-{seed}", settings, seed, **results)
    numbers, text = table("--against", "tau=1")
    row = numbers[numbers.tau == 2].iloc[0]
    assert row.half == "validation"
    assert row.difference == pytest.approx(fmean(gaps))
    assert row.p == pytest.approx(ttest_1samp(gaps, 0).pvalue)
    titles, _, row_of_ours = cells(text)
    shown = dict(zip(titles, row_of_ours, strict=True))
    assert shown["validation top-1 [%]"] == "80.17"
    assert shown["test top-1 [%]"] == "79.00"
    write(model, "whole", {}, top1_last=70.0)  # without a split: all are judged on the test set
    assert set(table()[0].half) == {"test"}


def test_a_table_does_not_merge_runs_whose_data_differ(model: Run):
    """Of the runs on a data set those count whose images are those of the newest."""
    images = {"images": "54 images", "pixels": "1"}
    for seed, record in enumerate([images, images, images | {"pixels": "2"}, {}]):
        write(model, str(seed), {}, seed, age=seed, top1_last=80.0 + seed, data=record)
    numbers, text = table()
    assert numbers.n.tolist() == [2]
    assert numbers["mean"].tolist() == [82.5]
    assert text.count("not counted: ") == 2
    assert "has other pixels" in text


PRINTED = """
title: Printed
overrides: [model.embed_dim=16, dataset.limit=60, dataset.eval_limit=60, recipe.batch_size=20,
  recipe.epochs=1, recipe.max_steps=1, device=cpu, 'augmentation=[]']
rows:
  a: {overrides: [], printed: {top1: 50.25}}
  b: {overrides: [recipe.lr=0.01], printed: {top1: 60.75}, against: a}
"""


def of_printed(text: str, *overrides: str) -> tuple[pd.DataFrame, str, str]:
    """Trains the study; returns the numbers of its table, its page and what the command said."""
    Path("mine.yaml").write_text(text)
    result = script("reproduce", "mine.yaml", "seeds=1", overrides)
    assert_succeeded(result)
    return pd.read_csv(newest("mine-*.csv")), newest("mine-*.md").read_text(), result.out


@pytest.mark.parametrize(
    ("change", "told"),
    [("scale=smoke", "dataset=digits"), ("recipe.weight_decay=0.1", "recipe.weight_decay=0.1")],
)
def test_runs_that_a_study_does_not_name_stand_beside_no_printed_value(change: str, told: str):
    """The terminal and the file warn, and say what was changed."""
    numbers, page, said = of_printed(PRINTED, change)
    assert numbers.printed.isna().all()
    for shown in (page, said):
        assert "WARNING: " in shown
        assert f"`{told}`" in shown
        assert "paper [%]" not in shown


def test_a_printed_accuracy_stands_beside_the_test_set_alone():
    """Papers print it of the test set; the validation split is of the training images."""
    split = PRINTED.replace("device=cpu", "device=cpu, dataset.validation=0.2")
    numbers, page, _ = of_printed(split)
    top1 = numbers[numbers.outcome == "top1"].set_index(["half", "row"])
    assert top1.printed["test"].tolist() == [50.25, 60.75]
    assert top1.printed["validation"].isna().all()
    main, _, others = page.partition("\n## Other outcomes")
    assert "validation top-1 [%]" in main
    assert "paper" not in main.partition("\n- ")[0]
    assert "60.75" in others


OWN_IMAGES = {"dataset.name": "own", "dataset.root": "images"}


@pytest.fixture
def run(here: Path, model: Run) -> Path:
    """A run of the study mine.yaml."""
    overrides = (
        "augmentation=[htm]",
        "recipe.max_steps=1",
        "dataset.name=own",
        "dataset.root=images",
    )
    study = {"title": "Mine", "overrides": line_of([SMALL, overrides]), "rows": {"a": []}}
    Path("mine.yaml").write_text(yaml.safe_dump(study))
    return write(model, "mine", OWN_IMAGES)


@pytest.mark.parametrize(
    ("settings", "seed", "status"),
    [({TAU: 9.0}, 0, "finished"), ({}, 3, "finished"), ({}, 0, "interrupted")],
    ids=["another row", "another seed", "not finished"],
)
def test_another_run_is_not_published(
    run: Path, model: Run, settings: Settings, seed: int, status: str
):
    other = write(model, "other", {**OWN_IMAGES, **settings}, seed, status=status)
    assert_refused(script("publish", str(other), "mine.yaml"), "must be a finished run of mine")
    assert not Path("mine.jsonl").exists()


def test_a_published_run_is_a_line_from_which_its_row_is_known(run: Path):
    """A copy of it, and one with another spelling of its folder, replace the line."""
    copied = shutil.copytree(run, "outputs/copied")
    respelled = shutil.copytree(run, "outputs/respelled")
    config = Path(respelled, "config.yaml")
    config.write_text(config.read_text().replace("root: images", "root: ./images/"))
    for folder in (run, respelled, copied):
        assert_succeeded(script("publish", str(folder), "mine.yaml"))
        line = json.loads(Path("mine.jsonl").read_text())  # there is only one
        assert line["name"] == "mine"
        assert line["config"]["augmentation"]["htm"]["tau"] == "auto"
        assert line["config"]["dataset"]["root"] == "images"


def test_training_writes_what_tables_read():
    overrides = (SMALL, f"{TAU}=inf", f"{RHO}=0", "recipe.epochs=3", "recipe.evaluate_every=2")
    run = trained(overrides)
    assert run.summary["easy_share"] == 1
    assert run.summary["easy_samples"] == 20
    assert [line["epoch"] for line in run.summary["log"]] == [2, 3]
    last = [line for line in run.steps if line["epoch"] == 3]
    tokens = sum(line["mixed_tokens"] * line["mixed_samples"] for line in last)
    mixed = sum(line["mixed_samples"] for line in last)
    assert tokens > 0
    assert run.summary["mixed_samples"] == pytest.approx(mixed / 3)
    assert run.summary["mixed_tokens"] == pytest.approx(tokens / mixed)
