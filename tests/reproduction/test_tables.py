"""Tables of any runs and of studies: statistics against scipy, what is shown, a published line."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy.stats import t, ttest_rel

from tests.doors import SMALL, Run, script, train

pytestmark = pytest.mark.usefixtures("here")
TAU = "augmentation.htm.tau"
RHO = "augmentation.htm.rho"
Settings = Mapping[str, Any]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of one step, whose files are the models of all others here."""
    root = tmp_path_factory.mktemp("tables")
    words = ("augmentation=[htm]", "recipe.max_steps=1", f"output_root={root}", "name=mine")
    assert train(*SMALL, *words).status == 0
    return Run(root / "mine")


def write(model: Run, name: str, settings: Settings, seed: int = 0, **summary: Any) -> Path:
    """Copies a finished run, with other settings, and other entries of its summary."""
    folder = Path("outputs", name)
    shutil.copytree(model.path, folder, ignore=shutil.ignore_patterns("checkpoints"))
    config = model.config | {"seed": seed}
    for key, value in settings.items():
        *groups, last = key.split(".")
        part = config
        for group in groups:
            part = part[group]
        part[last] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    top1 = summary.get("top1_last", 80.0)
    (line,) = model.summary["log"]
    log = [line | {"top1": top1, "eval_loss": summary.pop("loss", 1.0)}]
    best = {"top1_best": top1 + 0.5, "top1_median10": top1}
    written = {**model.summary, "log": log, **best, "seed": seed, **summary}
    (folder / "summary.json").write_text(json.dumps(written))
    return folder


def several(model: Run, values: Mapping[float, Mapping[int, float]], key: str = TAU) -> None:
    """Writes runs: value of a key -> seed -> accuracy."""
    for value, by_seed in values.items():
        for seed, top1 in by_seed.items():
            write(model, f"{value}-{seed}", {key: value}, seed, top1_last=top1)


def table(*words: str) -> tuple[pd.DataFrame, str]:
    """The numbers of the runs in outputs/, and the table as text."""
    result = script("runs", "outputs", "--csv", "numbers.csv", *words)
    assert result.status == 0, result.err
    return pd.read_csv("numbers.csv").rename(columns=lambda x: x.rpartition(".")[2]), result.out


def check(row: Any, ours: Mapping[int, float], base: Mapping[int, float]) -> float:
    """Compares a row with its statistics by hand; returns p."""
    assert row.n == len(ours)
    assert row.mean == pytest.approx(fmean(ours.values()), abs=1e-9)
    assert row.std == pytest.approx(stdev(ours.values()), abs=1e-9)
    pairs = [(x, base[seed]) for seed, x in ours.items() if seed in base]
    gaps = [x - y for x, y in pairs]
    assert row.pairs == len(pairs)
    assert row.difference == pytest.approx(fmean(gaps), abs=1e-9)
    half = t.ppf(0.975, len(gaps) - 1) * stdev(gaps) / len(gaps) ** 0.5
    ends = [fmean(gaps) - half, fmean(gaps) + half]
    assert [row.low, row.high] == pytest.approx(ends, abs=1e-9)
    p = float(ttest_rel(*zip(*pairs, strict=True)).pvalue)
    assert row.p == pytest.approx(p, abs=1e-12)
    return p


def holm(p: Mapping[Any, float]) -> dict[Any, float]:
    """The adjusted p-values of Holm (1979), by their definition."""
    ordered = sorted(p, key=lambda x: p[x])
    steps = [min(1.0, (len(p) - i) * p[x]) for i, x in enumerate(ordered)]
    return {x: max(steps[: i + 1]) for i, x in enumerate(ordered)}


def test_rows_have_the_paired_statistics_of_their_seeds(trained: Run):
    """Seeds differ by more than rows, and each row lacks other seeds."""
    rng = np.random.default_rng(10)
    of_seed = rng.normal(80, 3, 9)
    gains = {1.0: 0.0, 2.0: 0.8, 3.0: 0.5, 4.0: 0.4, 5.0: 0.5}
    values = {
        tau: {
            seed: float(of_seed[seed] + gain + rng.normal(0, 0.5))
            for seed in range(9)
            if seed != (3 * place) % 9
        }
        for place, (tau, gain) in enumerate(gains.items())
    }
    several(trained, values)
    numbers, _ = table("--against", "tau=1")
    rows = {row.tau: row for row in numbers.itertuples()}
    p = {tau: check(rows[tau], values[tau], values[1]) for tau in gains if tau != 1}
    ordered = sorted(p.values())
    steps = [(len(p) - i) * x for i, x in enumerate(ordered)]
    assert steps != sorted(steps)  # so that Holm's running maximum is seen
    for tau, value in holm(p).items():
        assert rows[tau].p_holm == pytest.approx(value, abs=1e-12)
    assert np.isnan([rows[1].pairs, rows[1].difference, rows[1].p]).all()
    seconds = trained.summary["seconds"]
    assert rows[2].seconds == pytest.approx(seconds)
    assert rows[2].top1_best > 80


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
    trained: Run, ours: dict[int, float], pairs: int, difference: float
):
    several(trained, {1.0: {0: 2.0, 1: 4.0, 2: 9.0}, 2.0: ours})
    numbers, _ = table("--against", "tau=1")
    row = numbers[numbers.tau == 2].iloc[0]
    assert row.pairs == pairs
    assert row.difference == pytest.approx(difference, nan_ok=True)
    assert pd.isna([row.p, row.p_holm, row.low]).all()


def test_the_newest_finished_run_of_a_seed_counts_and_the_others_are_named(trained: Run):
    for age, (name, top1, more) in enumerate(
        [
            ("old", 50.0, {}),
            ("new", 60.0, {}),
            ("failed", 99.0, {"status": "failed", "error": "CUDA | out\nof memory"}),
        ]
    ):
        folder = write(trained, name, {}, top1_last=top1, **more)
        os.utime(folder / "summary.json", (1_000_000 + age,) * 2)
    write(trained, "open", {}, 1, status="failed", error="step 3: the loss is nan")
    write(trained, "broken", {}, 2, top5_last="high")
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
        ([{TAU: 2.5}, {TAU: 0.5}, {TAU: np.inf}], ["htm.tau"]),
        ([{"augmentation.htm": None}, {}], ["augmentation.mixing"]),
        ([{"devices": 1}, {"devices": 2}], ["devices"]),
        (
            [{"dataset.limit": 60}, {"dataset.limit": 50, "model.depth": 3}],
            ["model.depth", "dataset.limit"],
        ),
        (
            [{TAU: 1, "recipe.epochs": 2}, {TAU: 2, "recipe.epochs": 28}],
            ["htm.tau", "recipe.epochs"],
        ),
    ],
)
def test_the_columns_are_the_settings_that_differ(
    trained: Run, variants: list[Settings], heads: list[str]
):
    for number, settings in enumerate(variants):
        write(trained, str(number), settings, top1_last=60.0 + number)
    _, text = table()
    titles = next(line for line in text.splitlines() if line.startswith("|"))
    first = [title.strip() for title in titles.split("|")[1:]]
    assert first[: len(heads)] == heads
    assert first[len(heads)] == "n"
    if heads == ["htm.tau"]:
        rows = [line.split("|")[1].strip() for line in text.splitlines()[2:] if line[:1] == "|"]
        assert rows[-3:] == ["0.5", "2.5", "inf"]


def test_runs_that_have_no_name_in_common_leave_no_empty_note(trained: Run):
    """Below a table stands what all runs share of model, data set and stack."""
    write(trained, "one", {"model.name": "a", "dataset.name": "b"})
    other = {"model.name": "c", "dataset.name": "d", "augmentation.htm": None}
    write(trained, "other", other)
    _, text = table()
    notes = [line for line in text.splitlines() if line.startswith("-")]
    assert notes
    assert all(line.strip("- ") for line in notes)


def test_a_row_that_mixed_nothing_says_so(trained: Run):
    for seed in range(3):
        write(trained, f"auto{seed}", {}, seed, mixed_share=0.5, mixed_tokens=9.0)
        idle = {"mixed_share": 1.0, "mixed_tokens": 0.0, "top1_last": 80.0 + seed**2}
        write(trained, f"idle{seed}", {RHO: 1.0}, seed, **idle)
    _, text = table("--against", "rho=auto")
    rows = [line for line in text.splitlines() if "replaced no token" in line]
    assert len(rows) == 1
    assert rows[0].startswith("|")
    assert "100.0" in rows[0]


@pytest.mark.parametrize(
    ("variants", "is_drawn"),
    [
        ([{"recipe.lr": 0.1}, {"recipe.lr": 0.2}], True),
        ([{"recipe.lr": x, "recipe.epochs": y} for x in (0.1, 0.2) for y in (1, 2)], True),
        ([{"recipe.lr": 0.1}], False),
    ],
)
def test_a_plot_shows_one_or_two_settings(trained: Run, variants: list[Settings], is_drawn: bool):
    for number, settings in enumerate(variants):
        write(trained, str(number), settings, top1_last=60.0 + number)
    result = script("runs", "outputs", "--plot", "plot.png")
    assert (result.status == 0) == is_drawn == Path("plot.png").exists()
    assert Path("plot.pdf").exists() == is_drawn


def test_a_plot_shows_the_validation_split(trained: Run, drawn_texts: dict[str, list[str]]):
    for lr in (0.1, 0.2):
        split = {"selected_epoch": 1, "top1_selected": 50.0, "top5_selected": 90.0}
        split |= {"val_top1_last": 70 + 100 * lr, "val_top1_selected": 90.0}
        write(trained, str(lr), {"recipe.lr": lr, "dataset.validation": 0.1}, **split)
    assert script("runs", "outputs", "--plot", "plot.png").status == 0
    assert any(text.startswith("validation top-1") for text in drawn_texts["plot"])


def test_a_sweep_ends_with_its_table_and_plot():
    words = ("augmentation.htm.tau=0.5,inf", "seed=0,1", "recipe.max_steps=2", *SMALL)
    result = train("-m", *words, "augmentation=[htm]")
    assert result.status == 0, result.err
    (row,) = (x for x in result.out.splitlines() if re.match(r"\| +inf ", x))
    assert row.split("|")[2].strip() == "2"  # two seeds, all samples mixed
    assert "100.0" in row
    first = {path: path.read_bytes() for path in Path("outputs/report").iterdir()}
    assert {path.suffix for path in first} == {".md", ".csv", ".png", ".pdf"}
    (page,) = (text.decode() for path, text in first.items() if path.suffix == ".md")
    assert "`augmentation.htm.tau`" in page
    assert "`recipe.max_steps=2`" in page
    other = [word.replace("max_steps=2", "max_steps=3") for word in words]
    assert train("-m", *other, "augmentation=[htm]").status == 0
    second = {*Path("outputs/report").iterdir()} - first.keys()
    assert len(second) == 4
    assert all(path.read_bytes() == text for path, text in first.items())
    assert train("-m", *words, "augmentation=[htm]", "resume=auto").status == 0
    assert {*Path("outputs/report").iterdir()} == first.keys() | second


def test_runs_with_a_split_are_judged_on_it_and_the_test_set_stands_beside(trained: Run):
    """Validation prefers tau=1, the test set tau=2: p and difference are those of validation."""
    gains = np.random.default_rng(3).normal(0, 0.5, (2, 4))
    for seed in range(4):
        for tau, val, test in ((1.0, 90.0, 60.0), (2.0, 80.0, 79.0)):
            split = {"val_top1_last": val + gains[int(tau) - 1, seed], "top1_last": test}
            split |= {"selected_epoch": 1, "top1_selected": test, "val_top1_selected": val}
            settings = {TAU: tau, "dataset.validation": 0.1}
            write(trained, f"{tau}-{seed}", settings, seed, **split)
    numbers, text = table("--against", "tau=1")
    row = numbers[numbers.tau == 2].iloc[0]
    ours = 80 + gains[1]
    base = 90 + gains[0]
    assert (row.outcome, row.half) == ("top1", "validation")
    assert row.difference == pytest.approx((ours - base).mean())
    assert row.p == pytest.approx(ttest_rel(ours, base).pvalue)
    assert "validation top-1 [%]" in text
    assert "Judged on the validation split" in text
    assert re.search(r"test top-1 \[%\]", text)
    assert "79.00" in text
    assert "+19" not in text


def test_runs_of_which_some_have_a_split_are_all_shown(trained: Run):
    """They have the accuracy on the test set alone in common."""
    split = {"val_top1_last": 90.0, "selected_epoch": 1, "top1_selected": 60.0}
    write(trained, "split", {TAU: 1.0, "dataset.validation": 0.1}, 0, top1_last=60.0, **split)
    write(trained, "whole", {TAU: 2.0}, 0, top1_last=70.0)
    numbers, text = table()
    assert sorted(numbers["mean"]) == [60.0, 70.0]
    assert {*numbers.half} == {"test"}
    assert "without a finished run" not in text


def test_a_table_does_not_merge_runs_whose_data_differ(trained: Run):
    """Of the runs on a data set those count whose images are those of the newest."""
    images = {"images": "54 images", "pixels": "1"}
    for seed, record in enumerate([images, images, images | {"pixels": "2"}, {}]):
        folder = write(trained, str(seed), {}, seed, top1_last=80.0 + seed, data=record)
        os.utime(folder / "summary.json", (1_000_000 + seed,) * 2)
    numbers, text = table()
    assert numbers.n.tolist() == [2]
    assert numbers["mean"].tolist() == [82.5]
    assert text.count("not counted: ") == 2
    assert "has other pixels" in text


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["nowhere"], "nowhere"),
        (["empty"], "no runs"),
        (["outputs", "--against", "lr=1"], "lr=1"),
        (["outputs", "--against", "tau=7"], "tau=7"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_a_line(trained: Run, words: list[str], part: str):
    several(trained, {1.0: {0: 2.0}, 2.0: {0: 3.0}})
    Path("empty").mkdir()
    result = script("runs", *words)
    assert (result.status, len(result.lines)) == (2, 1)
    assert part in result.err


ROWS = """
title: Mine
tested: loss_last
overrides: [model.embed_dim=16, dataset.limit=60, dataset.eval_limit=60, recipe.batch_size=20,
  recipe.epochs=1, recipe.max_steps=1, device=cpu]
rows:
  none: ['augmentation=[]']
  a: {overrides: ['augmentation=[vtm]'], against: none, role: untested}
  b: {overrides: ['augmentation=[htm]'], against: none, role: primary}
  c: {overrides: ['augmentation=[htm]', augmentation.htm.tau=1], against: none}
  d: {overrides: ['augmentation=[htm]', augmentation.htm.tau=2], against: c}
"""


def study(text: str, seeds: int) -> pd.DataFrame:
    """Trains a study, or finds it trained, and returns the numbers of its table."""
    Path("mine.yaml").write_text(text)
    result = script("reproduce", "mine.yaml", f"seeds={seeds}")
    assert result.status == 0, result.err
    newest = max(Path("outputs/report").glob("mine*.csv"), key=os.path.getmtime)
    numbers = pd.read_csv(newest).set_index("row")
    return numbers[numbers.outcome == "loss"]


PRINTED = """
title: Printed
overrides: [model.embed_dim=16, dataset.limit=60, dataset.eval_limit=60, recipe.batch_size=20,
  recipe.epochs=1, recipe.max_steps=1, device=cpu, 'augmentation=[]']
rows:
  a: {overrides: [], printed: {top1: 50.25}}
  b: {overrides: [recipe.lr=0.01], printed: {top1: 60.75}, against: a}
quoted:
  c: {"": {top1: 70.5}}
"""


def test_a_quoted_row_is_not_counted_as_one_without_a_run():
    """Nobody trains it."""
    numbers = study(PRINTED, 1)
    assert "c" in numbers.index
    text = Path("outputs/report/mine-seeds=1.md").read_text()
    assert "2 finished runs" in text
    assert "rows without a finished run" not in text
    (run,) = Path("outputs").glob("mine-b-s0-*")
    shutil.rmtree(run)
    assert script("report", "--study", "mine.yaml", "--seeds", "1").status == 0
    text = Path("outputs/report/mine-seeds=1.md").read_text()
    assert "rows without a finished run: 1" in text


def test_a_printed_accuracy_stands_beside_the_test_set_alone():
    """Papers print it of the test set; the validation split is of the training images."""
    split = PRINTED.replace("device=cpu", "device=cpu, dataset.validation=0.2")
    study(split, 1)
    numbers = pd.read_csv("outputs/report/mine-seeds=1.csv")
    top1 = numbers[(numbers.outcome == "top1") & (numbers.row != "c")].set_index(["half", "row"])
    assert top1.printed["test"].tolist() == [50.25, 60.75]
    assert top1.printed["validation"].isna().all()
    assert top1.printed_difference["test", "b"] == pytest.approx(10.5)
    assert top1.printed_difference["validation"].isna().all()
    main, _, others = Path("outputs/report/mine-seeds=1.md").read_text().partition("\n## ")
    assert "validation top-1 [%]" in main
    assert "paper" not in main
    assert "60.75" in others


def copy(run: Run, seed: int, **summary: Any) -> None:
    """Copies a trained run of the study as that of another seed."""
    write(run, f"{run.path.name}-{seed}", {"seed": seed, "resume": "auto"}, seed, **summary)


def test_a_study_may_test_the_loss_with_a_primary_and_an_untested_row():
    study(ROWS, 1)
    trained = {name: Run(*Path("outputs").glob(f"mine-{name}-s0-*")) for name in ("none", *"abcd")}
    rng = np.random.default_rng(1)
    losses = {}
    for name, run in trained.items():
        losses[name] = [float(x) for x in rng.normal(1, 0.1, 4)]
        for seed, loss in enumerate([*losses[name], 9.0], 1):  # the fifth is not of the study
            copy(run, seed, loss=loss, top1_last=float(rng.normal(80)))
        shutil.rmtree(run.path)
    rows = study(ROWS.replace("rows:", "first_seed: 1\nrows:"), 4)
    assert (rows.n == 4).all()
    assert rows["mean"]["d"] == pytest.approx(fmean(losses["d"]))
    p = {}
    for name, base in {"a": "none", "b": "none", "c": "none", "d": "c"}.items():
        gaps = [x - y for x, y in zip(losses[name], losses[base], strict=True)]
        assert rows.difference[name] == pytest.approx(fmean(gaps))
        assert rows.below[name] == sum(gap < 0 for gap in gaps)
        p[name] = ttest_rel(losses[name], losses[base]).pvalue
    assert rows.p[["b", "c", "d"]].tolist() == pytest.approx([p[x] for x in "bcd"])
    assert rows.p_holm[["c", "d"]].to_dict() == pytest.approx(holm({x: p[x] for x in "cd"}))
    assert rows[["p", "p_holm"]].loc["a"].isna().all()
    assert pd.isna(rows.p_holm["b"])
    text = Path("outputs/report/mine-seeds=4.md").read_text()
    assert "primary" in text
    assert "untested" in text
    for folder in ("results", "docs"):
        Path(folder).mkdir()
    looks = ROWS.replace("rows:", "first_seed: 1\nseeds: 4\nlooks: {2: 0.01, 4: 0.04}\nrows:")
    Path("results/mine.yaml").write_text(looks)
    each = sorted(Path("outputs").glob("mine-*-[1-4]"), key=lambda path: path.name[-1])
    later = [run for run in each if run.name[-1] in "34"]
    first = [run for run in each if run.name[-1] in "12"]
    for published, state in (
        ([*first[1:], *later], "3 seeds are whole, none has been reached"),  # seed 1 lacks a row
        (first[:1], "4 seeds are whole, this is the look at 4, seeds 1 to 4"),
    ):
        for run in published:
            assert script("publish", str(run), "results/mine.yaml").status == 0
        assert script("report", "--results", "results").status == 0
        assert state in Path("docs/results.md").read_text()
    lines = Path("results/mine.jsonl").read_text().splitlines()
    Path("results/mine.jsonl").write_text("".join(f"{x}\n" for x in lines if '"seed": 4' not in x))
    assert script("report", "--results", "results").status == 0
    page = Path("docs/results.md").read_text()
    mean = fmean(losses["a"][:2])  # of seeds 1 and 2, although 3 are whole
    assert "3 seeds are whole, this is the look at 2, seeds 1 to 2" in page
    assert re.search(rf"\| a +\| +2 \| +{mean:.3f} ", page)


def test_a_published_run_is_a_line_from_which_its_row_is_known(trained: Run):
    own = {"dataset.name": "own", "dataset.root": "images"}
    run = write(trained, "mine", own)
    overrides = [f"{key}={x}" for key, x in own.items()]
    overrides += [*SMALL, "augmentation=[htm]", "recipe.max_steps=1"]
    study = {"title": "Mine", "overrides": overrides, "rows": {"a": []}}
    Path("mine.yaml").write_text(yaml.safe_dump(study))
    words = ("publish", str(run), "mine.yaml")
    written = json.loads((run / "summary.json").read_text())
    for changes, part in (
        ({"status": "interrupted"}, "must be a finished run"),
        ({"weights_sha256": ...}, "weights_sha256"),
        ({"mixed_share": ...}, "mixed_share"),
    ):
        changed = {key: x for key, x in {**written, **changes}.items() if x is not ...}
        (run / "summary.json").write_text(json.dumps(changed))
        result = script(*words)
        assert (result.status, len(result.lines)) == (2, 1)
        assert part in result.err
        assert not Path("mine.jsonl").exists()
    (run / "summary.json").write_text(json.dumps(written))
    for name, settings, seed in (
        ("row", {**own, TAU: 9.0}, 0),
        ("seed", own, 3),
    ):  # not of the study
        result = script("publish", str(write(trained, name, settings, seed)), words[-1])
        assert (result.status, len(result.lines)) == (2, 1)
        assert "of mine.yaml" in result.err
    shutil.copytree(run, "outputs/copied")
    for folder, root in ((run, "images"), (run, "./images/"), (Path("outputs/copied"), "images")):
        config = folder / "config.yaml"
        config.write_text(config.read_text().replace("root: images", f"root: {root}"))
        assert script("publish", str(folder), words[-1]).status == 0
        (line,) = map(json.loads, Path("mine.jsonl").read_text().splitlines())  # is replaced
        assert line["name"] == "mine"
        assert line["config"][TAU] == "auto"
        assert line["config"]["dataset.root"] == "images"


def test_training_writes_what_tables_read():
    words = (*SMALL, "name=mine", f"{TAU}=inf", f"{RHO}=0", "recipe.epochs=3")
    assert train(*words, "recipe.evaluate_every=2").status == 0
    run = Run("outputs/mine")
    assert run.summary["mixed_share"] == 1
    assert run.summary["mixed_samples"] == 20
    assert [line["epoch"] for line in run.summary["log"]] == [2, 3]
    last = [line for line in run.steps if line["epoch"] == 3]
    tokens = sum(line["mixed_tokens"] * line["mixed_samples"] for line in last)
    mixed = sum(line["mixed_samples"] for line in last)
    assert tokens > 0
    assert run.summary["mixed_tokens"] == pytest.approx(tokens / mixed)
