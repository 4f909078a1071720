"""The table of a study: statistics, tests, printed values, notes, and its text formats."""

import math
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import false_discovery_control, t, ttest_rel

from reproduction.runs.identity import run_hash
from reproduction.studies.columns import p_text, spread
from reproduction.studies.plan import plan, points_of, studies_of
from reproduction.studies.results import results_of
from reproduction.studies.runs import read_runs
from reproduction.studies.study import Settings
from reproduction.studies.table import compare, holm, statistics
from tests.reproduction.tables import Configs, result, write_run

BASELINE, HTM = "table1/cifar100_baseline", "table1/cifar100_htm"
VALUES = st.lists(st.floats(50, 90), min_size=3, max_size=8)


def frame(**columns: dict[int, float]) -> pd.DataFrame:
    return pd.DataFrame(columns)


@given(VALUES, VALUES)
def test_compare_is_a_paired_test_over_common_seeds(ours: list[float], base: list[float]):
    pairs = list(zip(ours, base, strict=False))
    accuracy = frame(ours=dict(enumerate(ours)), base=dict(enumerate(base)))
    found = compare(accuracy, "ours", "base")
    assert found["test_seeds"] == list(range(len(pairs)))
    assert found["difference"] == pytest.approx(fmean(a - b for a, b in pairs))
    if "test_p" in found:
        test = ttest_rel(*zip(*pairs, strict=True))
        assert found["test_p"] == pytest.approx(test.pvalue)
        assert found["test_t"] == pytest.approx(test.statistic)
        gaps = [a - b for a, b in pairs]
        half = t.ppf(0.975, len(gaps) - 1) * stdev(gaps) / len(gaps) ** 0.5
        ends = [fmean(gaps) - half, fmean(gaps) + half]
        assert [found["test_low"], found["test_high"]] == pytest.approx(ends)


@pytest.mark.parametrize(
    ("ours", "base", "note"),
    [
        ({0: 1.0}, {0: 2.0}, "needs 3 common seeds, has 1"),
        ({0: 1.0}, {1: 2.0}, "needs 3 common seeds, has 0"),
        ({0: 1.0, 1: 2.0}, {0: 2.0, 1: 4.0}, "needs 3 common seeds, has 2"),
        ({0: 1.0, 1: 2.0, 2: 5.0}, {0: 1.0, 1: 2.0, 2: 5.0}, "values are identical"),
        ({0: 1.0, 1: 2.0, 2: 5.0}, {0: 2.0, 1: 3.0, 2: 6.0}, "all differences are equal"),
    ],
)
def test_compare_says_why_there_is_no_test(ours, base, note):
    found = compare(frame(ours=ours, base=base), "ours", "base")
    assert found["test_note"] == note and "test_p" not in found
    assert compare(frame(ours=ours), "ours", "missing")["test_note"].endswith("has 0")


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_bounds_and_orders_the_p_values(values: list[float]):
    p = pd.Series([*values, math.nan])
    adjusted = holm(p)
    assert pd.isna(adjusted.iloc[-1])
    known = adjusted.iloc[:-1]
    assert (known >= p.iloc[:-1] - 1e-12).all() and (known <= 1).all()
    order = p.iloc[:-1].argsort()
    assert known.iloc[order].is_monotonic_increasing
    by_bonferroni = (p.iloc[:-1] * len(values)).clip(upper=1)
    assert (known <= by_bonferroni + 1e-12).all()
    assert (known >= false_discovery_control(values, method="bh") - 1e-12).all()


def test_holm_of_known_values():
    assert holm(pd.Series([0.01, 0.04, 0.03])).tolist() == pytest.approx([0.03, 0.06, 0.06])


def test_statistics_are_means_and_sample_deviations(tmp_path: Path, configs: Configs):
    values = [82.0, 83.5, 82.25]
    for seed, top1 in enumerate(values):
        write_run(tmp_path, configs[HTM], seed, top1=top1, seconds=3600.0 * (seed + 1))
    write_run(tmp_path, configs[HTM], 7, status="interrupted")
    row = statistics(read_runs(tmp_path)).loc[run_hash(configs[HTM])]
    assert (row.n, row.seeds) == (3, [0, 1, 2])
    assert row.top1_last_mean == pytest.approx(fmean(values))
    assert row.top1_last_std == pytest.approx(stdev(values))
    assert row.seconds_mean == 7200 and row.devices == [1]


def two_rows(outputs: Path, configs: Configs) -> None:
    for seed in range(3):
        write_run(outputs, configs[BASELINE], seed, top1=82.0 + seed**2)
        write_run(outputs, configs[HTM], seed, top1=83.0 + seed)


def test_table_shows_ours_beside_the_paper(tmp_path: Path, configs: Configs):
    two_rows(tmp_path, configs)
    table = result(tmp_path, "table1").numbers.set_index("label")
    row = table.loc[HTM]
    assert row.top1_last_minus_paper == pytest.approx(84 - 83.56)
    assert row.top1_best_minus_paper == pytest.approx(84.5 - 83.56)
    assert row.paper_difference == pytest.approx(83.56 - 82.87)
    assert row.difference == pytest.approx(84 - (82 + 83 + 86) / 3)
    assert (row.n, row.status) == (3, "finished")
    assert table.loc["table1/cifar100_vtm"].status == "not run"
    quoted = table.loc[table.index.isna()]
    assert len(quoted) == 28 and set(quoted.status) == {"quoted"}
    first = result(tmp_path, "table1").numbers
    assert first[first.row == "ResNet50"].paper_top1.tolist() == [90.6, 61.68]
    assert first[first.row == "ResNet50"].parameters.tolist() == [23528522, 23528522]


STUDY = """
title: Mine
tested: loss_last
rows:
  none: ['augmentation=[]']
  a: {overrides: ['augmentation=[vtm]'], against: none, role: untested}
  b: {overrides: ['augmentation=[htm]'], against: none, role: primary}
  c: {overrides: ['augmentation=[htm]', augmentation.htm.tau=1], against: none}
  d: {overrides: ['augmentation=[htm]', augmentation.htm.tau=2], against: none}
"""


def test_a_study_may_test_the_loss_with_a_primary_and_an_untested_row(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text(STUDY)
    settings = Settings(outputs=str(tmp_path / "outputs"))
    for number, point in enumerate(points_of(studies_of(str(file)), settings)):
        for seed in range(4):
            loss = 1 + number * (seed - 0.5) / 10
            log = [{"epoch": 28, "top1": 80.0, "eval_loss": loss}]
            write_run(tmp_path / "outputs", point.config, seed, log=log)
    (table,), _ = results_of(studies_of(str(file)), settings)
    rows = table.numbers.set_index("row")
    assert rows.difference["b"] == pytest.approx(2 * fmean([-0.5, 0.5, 1.5, 2.5]) / 10)
    p = rows.test_p
    assert pd.isna(p["a"]) and rows.test_low["a"] < rows.difference["a"] and p["b"] > 0
    assert pd.isna(rows.test_p_holm["b"])
    assert rows.test_p_holm["c"] == pytest.approx(min(1, 2 * p["c"]))  # of two tests
    shown = table.shown().set_index("row")
    assert shown["p (Holm)"][["none", "a", "b"]].tolist() == ["-", "untested", "primary"]
    assert shown.difference["b"] == "+0.200" and set(shown.pairs) == {"-", "4"}
    second = table.more["Held-out loss and top-5"].set_index("row")
    assert second["lower in"]["d"] == "1 of 4" and second["top-1, difference"]["d"] == "+0.00"
    assert any(note.startswith("Primary: b +0.200 (p = ") for note in table.notes)


LOOKS = """
title: Mine
rows:
  none: ['augmentation=[]']
  a: {overrides: ['augmentation=[htm]'], against: none, role: primary}
  b: {overrides: ['augmentation=[htm]', augmentation.htm.tau=1], against: none}
first_seed: 2
seeds: 4
looks: {3: 0.01, 4: 0.04}
"""


def test_a_study_with_looks_has_the_whole_seeds_of_the_latest_look_alone(tmp_path: Path):
    file, outputs = tmp_path / "mine.yaml", tmp_path / "outputs"
    file.write_text(LOOKS)
    settings = Settings(outputs=str(outputs))
    assert [run.config.seed for run in plan(str(file), settings)][::3] == [2, 3, 4, 5]
    none, a, b = points_of(studies_of(str(file)), settings)

    def train(config: Any, seed: int, gain: float) -> None:
        write_run(outputs, config, seed, top1=80 + seed + gain)

    def looked() -> tuple[pd.DataFrame, str, str]:
        (table,), _ = results_of(studies_of(str(file)), settings)
        return table.numbers.set_index("row"), table.notes[0], " ".join(table.notes)

    for seed in (1, 2, 3, 5, 6):  # 1 and 6 are none of the study's
        train(none.config, seed, 0)
        train(b.config, seed, 2 + seed / 100)
        if seed != 5:
            train(a.config, seed, 1 + seed / 10)
    rows, note, _ = looked()
    plans = "Looks are at 3 seeds (at 1 %) and 4 seeds (at 4 %), and only whole seeds count: "
    assert note == f"{plans}2 are whole, none has been reached."
    assert (rows.n == 0).all() and rows.difference.isna().all()

    for config, gain in ((none.config, 0.0), (a.config, 1.4), (b.config, 2.04)):
        train(config, 4, gain)
    rows, note, notes = looked()
    assert note == f"{plans}3 are whole, this is the look at 3."
    assert [*rows.n] == [3, 3, 3] and rows.seeds["none"] == [2, 3, 4]
    assert rows.difference["a"] == pytest.approx(1.3) and rows.pairs["b"] == 3
    assert "Primary: a +1.30 (p = 0.002). Significant at 1 %: b +2.03" in notes

    train(a.config, 5, 1.5)
    rows, note, notes = looked()
    assert note == f"{plans}4 are whole, this is the look at 4."
    assert rows.seeds["b"] == [2, 3, 4, 5] and "Significant at 4 %: b +2.04" in notes


def test_row_is_not_compared_with_itself(tmp_path: Path, configs: Configs):
    two_rows(tmp_path, configs)
    sweep = result(tmp_path, "sweep-tau").numbers.set_index("row")
    own = sweep.loc["2 (as in Table 1)"]
    assert own.n == 3 and pd.isna(own.difference) and own.paper_top1 == 83.56
    assert sweep.loc["baseline"].difference == pytest.approx(-1 / 3)
    full = result(tmp_path, "table4").numbers
    assert pd.isna(full.test_note[0])


def test_other_scales_and_data_are_marked_and_not_compared_with_the_paper(
    tmp_path: Path, configs: Configs
):
    two_rows(tmp_path, configs)
    smoke = result(tmp_path, "table1", scale="smoke")
    assert smoke.mark == "smoke scale" and "top1_last_minus_paper" not in smoke.numbers
    other = result(tmp_path, "table3", dataset="cifar10")
    assert other.mark == "cifar10 instead of CIFAR-100"
    page, *_ = smoke.write(tmp_path)
    assert "> **WARNING. SMOKE SCALE: not the paper's experiments.**" in page.read_text()
    assert result(tmp_path, "table1").mark is None


def test_notes_say_what_is_significant_shared_and_left_out(tmp_path: Path, configs: Configs):
    for seed in range(3):
        write_run(tmp_path, configs[BASELINE], seed, top1=80.0 + seed)
        write_run(tmp_path, configs[HTM], seed, top1=85.0 + 1.01 * seed)
    write_run(tmp_path, configs["table1/cifar100_vtm"], 0, top1=81.0)
    vtm = configs["table1/cifar100_htm_vtm"]
    write_run(tmp_path, vtm, 5, "odd", status="failed", error="step 3: the loss is nan", epochs=7)
    notes = " ".join(result(tmp_path, "table1").notes)
    assert "Significant at 5 %: CCT-7/3x1(1500) + HTM on CIFAR-100 +5.01 (p = " in notes
    assert "Not tested (needs 3 common seeds, has 1): CCT-7/3x1(1500) + VTM on CIFAR-100." in notes
    assert "1 test; significant after Holm's correction: CCT-7/3x1(1500) + HTM" in notes
    assert "Not counted: odd is failed after epoch 7 of 1510: step 3: the loss is nan" in notes
    assert "7 finished runs, 14.00 hours in total, git ababababab." in notes
    assert "The baseline on CIFAR-100 has two values" in notes


def test_formats_hold_the_same_table(tmp_path: Path, configs: Configs):
    two_rows(tmp_path, configs)
    page, tex, csv = result(tmp_path, "table1").write(tmp_path)
    text, latex = page.read_text(), tex.read_text()
    assert r"| CCT-7/3x1(1500)\*" in text and "## CIFAR-100" in text and "## Parameters" in text
    assert "84.00 +/- 1.00" in text and "+0.69" in text and "top-5" not in text
    assert "84.00 +/- 1.00" in latex and r"\toprule" in latex and "% CIFAR-100" in latex
    numbers = pd.read_csv(csv)
    row = numbers[numbers.label == HTM].iloc[0]
    assert (row.top1_last_mean, row.seeds, row.scale) == (84.0, "0;1;2", "full")
    assert len(numbers) == 8 + 28


@pytest.mark.parametrize(
    ("values", "text"),
    [((82.875, 0.125), "82.88 +/- 0.12"), ((80.0, math.nan), "80.00"), ((None, None), "-")],
)
def test_spread_is_a_mean_with_its_deviation(values: tuple[Any, Any], text: str):
    row = SimpleNamespace(top1_mean=values[0], top1_std=values[1])
    assert spread(row, "top1") == text


def test_p_values_have_three_decimals_or_two_digits():
    assert [p_text(p) for p in (0.0412, 0.00099, math.nan)] == ["0.041", "9.9e-04", "-"]
