"""Tables of sweeps: runs, comparison with the cell's value, mixed samples and tokens."""

import json
from pathlib import Path

import pytest
from scipy.stats import ttest_rel

from reproduction.reporting.records import SweepRecord
from reproduction.reporting.render import as_json
from reproduction.reporting.tables import Table
from reproduction.studies.overview import sweeps_of
from reproduction.studies.plan import SWEEPS
from tests.reproduction.tables import (
    Configs,
    all_tables,
    sources_of,
    sweep_of,
    tables_of,
    write_metrics,
    write_run,
)

BASELINE, HTM = "table1/cifar100_baseline", "table1/cifar100_htm"


def record(table: Table, value: str | None) -> SweepRecord:
    (match,) = (r for r in table.records if isinstance(r, SweepRecord) and r.value == value)
    return match


def texts(table: Table, value: str | None) -> dict[str, str]:
    return {column.title: column.text(record(table, value)) for column in table.columns}


def test_sweep_table_has_the_baseline_and_the_planned_values(tmp_path: Path, configs: Configs):
    for sweep in sweeps_of(configs):
        table = sweep_of(tmp_path, configs, sweep.name)
        values = [r.value for r in table.records if isinstance(r, SweepRecord)]
        assert values == [None, *SWEEPS[sweep.name][2].split()]
        own = [r.value for r in table.records if isinstance(r, SweepRecord) and r.is_own]
        assert own == [{"tau": "2", "rho": "0.005", "kappa": "80"}[sweep.word]]
        assert {r.status for r in table.records} == {"not run"}


def test_sweep_value_of_the_cell_uses_the_cells_run(tmp_path: Path, configs: Configs):
    write_run(tmp_path, configs[HTM], name="htm")
    for sweep, value in (("sweep-tau", "2"), ("sweep-rho", "0.005")):
        table = sweep_of(tmp_path, configs, sweep)
        assert record(table, value).runs == ("htm",)
        assert texts(table, value)["top-1 paper"] == "83.56"
        assert sum(bool(r.runs) for r in table.records) == 1
    cells = next(note for note in table.notes if "Cells of the same configuration" in note)
    assert f"{HTM}, table3/attention, table4/full, table5/mixup_cutmix_htm, tau=2, rho" in cells


def test_only_full_scale_sweeps_show_the_papers_value(tmp_path: Path, configs: Configs):
    for scale, papers in (("full", {82.87, 83.56, 83.54}), ("short", set[float]())):
        sweeps = [t for t in all_tables(tmp_path, configs, scale) if "sweep" in t.name]
        records = [r for t in sweeps for r in t.records if isinstance(r, SweepRecord)]
        assert {r.paper for r in records} - {None} == papers


def test_sweep_values_are_tested_against_the_cells_value(tmp_path: Path, configs: Configs):
    own, other = [83.0, 83.5, 83.2], [82.0, 83.1, 82.9]
    for seed in range(3):
        write_run(tmp_path, configs[HTM], seed, top1=own[seed])
        write_run(tmp_path, configs["tau=0.5"], seed, top1=other[seed])
        write_run(tmp_path, configs[BASELINE], seed, top1=82.0 + seed)
    table = sweep_of(tmp_path, configs, "sweep-tau")
    assert record(table, "2").comparison is None
    for value, top1 in (("0.5", other), (None, [82.0, 83.0, 84.0])):
        test = record(table, value).comparison
        assert test is not None and test.seeds == (0, 1, 2)
        assert test.p == pytest.approx(ttest_rel(top1, own).pvalue)
        assert test.difference == pytest.approx((sum(top1) - sum(own)) / 3)
    assert texts(table, "4")["p"] == "-"
    (note,) = (note for note in table.notes if note.startswith("Significant"))
    assert "against the tau of Table 1: none." in note and "2 tests" in note
    assert "baseline -0.23 (p = " in note and "tau = 0.5 -0.57 (p = " in note
    assert record(table, None).runs == record_of_table1(tmp_path, configs).runs


def record_of_table1(outputs: Path, configs: Configs):
    records = tables_of(outputs, configs)[0][1].records
    return next(record for record in records if record.experiment == BASELINE)


def test_mixing_is_averaged_over_the_last_epochs_of_all_seeds(tmp_path: Path, configs: Configs):
    for seed, mixed in ((0, 10), (1, 14)):
        run = write_run(tmp_path, configs["tau=1"], seed)
        first, last = [(100, 100.0, 1.0)], [(mixed, 4.0, 1.0), (mixed, 6.0, 1.0)]
        write_metrics(run / "metrics.jsonl", [first, last])
    write_metrics(write_run(tmp_path, configs["tau=0"]) / "metrics.jsonl", [[(0, 0.0, 1.0)]])
    table = sweep_of(tmp_path, configs, "sweep-tau")
    assert texts(table, "1")["mixed samples"] == "12.00 +/- 2.83"
    assert texts(table, "1")["mixed tokens"] == "5.00 +/- 0.00"
    assert (texts(table, "0")["mixed samples"], texts(table, "0")["mixed tokens"]) == ("0.00", "-")
    entries = {entry["value"]: entry for entry in json.loads(as_json(table))["records"]}
    assert entries["1"]["mixed_samples_mean"] == 12 and entries["0"]["mixed_tokens_mean"] is None
    assert "mixed samples" not in {
        c.title for c in sweep_of(tmp_path, configs, "sweep-kappa").columns
    }


def test_run_without_metrics_is_named(tmp_path: Path, configs: Configs):
    write_run(tmp_path, configs["tau=1"], 0, name="lost")
    kept = write_run(tmp_path, configs["tau=1"], 1)
    write_metrics(kept / "metrics.jsonl", [[(8, 4.0, 1.0)]])
    table = sweep_of(tmp_path, configs, "sweep-tau")
    assert texts(table, "1")["n"] == "2" and texts(table, "1")["mixed samples"] == "8.00"
    (note,) = (note for note in table.notes if "lost" in note)
    assert note.startswith("Mixed samples and tokens are without lost: metrics.jsonl: not readable")


def test_sweep_runs_without_cell_belong_to_the_report(tmp_path: Path, configs: Configs):
    write_run(tmp_path, configs["kappa=256"], name="all tokens")
    collection = sources_of(tmp_path, configs).collection
    assert [run.folder for run in collection.runs()] == ["all tokens"]
    assert collection.unused == ()
