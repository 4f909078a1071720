"""The paper's tables from run folders: the runs of each cell, their statistics and notes."""

import dataclasses
import json
from pathlib import Path

import pytest
from scipy.stats import ttest_rel

from reproduction.reporting.cells import read_cells
from reproduction.reporting.collect import METRICS, Collection, collect
from reproduction.reporting.records import Record, records_of
from reproduction.reporting.tables import Table
from tests.reproduction.conftest import SMALL, Command, config_of
from tests.reproduction.tables import (
    Configs,
    set_time,
    shortened,
    sources_of,
    tables_of,
    write_run,
)

BASELINE, HTM = "table1/cifar100_baseline", "table1/cifar100_htm"


def record(table: Table, experiment: str) -> Record:
    (match,) = [record for record in table.records if record.experiment == experiment]
    return match


def texts(table: Table, experiment: str) -> dict[str, str]:
    row = record(table, experiment)
    return {column.title: column.text(row) for column in table.columns}


def reasons(collection: Collection) -> dict[str, str]:
    return {entry.folder: entry.reason for entry in collection.unused}


def test_cell_shows_mean_deviation_and_differences(tmp_path: Path, configs: Configs):
    for seed in (0, 1, 2):  # 80, 81, 82
        write_run(tmp_path, configs[HTM], seed)
    table = tables_of(tmp_path, configs)[0][1]
    row = texts(table, HTM)
    assert row["n"] == "3" and row["status"] == "3 finished"
    assert row["top-1 last"] == "81.00 +/- 1.00"
    assert row["top-1 median"] == "80.75 +/- 1.00"
    assert row["top-1 best"] == "81.50 +/- 1.00"
    assert row["top-1 paper"] == "83.56"
    assert (row["top-1 last - paper"], row["top-1 best - paper"]) == ("-2.56", "-2.06")
    assert table.notes[-1] == "3 finished runs, 6.00 hours in total, git ababababab."


def test_t_test_pairs_the_seeds_of_cell_and_baseline(tmp_path: Path, configs: Configs):
    for seed, (ours, baseline) in enumerate([(82.0, 81.0), (83.0, 81.5), (82.5, 82.0)]):
        write_run(tmp_path, configs[HTM], seed, top1=ours, top1_best=90.0 + seed**2)
        write_run(tmp_path, configs[BASELINE], seed, top1=baseline)
    write_run(tmp_path, configs[BASELINE], 9, top1=10.0)
    test = record(tables_of(tmp_path, configs)[0][1], HTM).comparison
    assert test is not None and test.seeds == (0, 1, 2)
    assert test.p == pytest.approx(ttest_rel([82.0, 83.0, 82.5], [81.0, 81.5, 82.0]).pvalue)
    assert test.difference == pytest.approx(1.0)


def test_cell_without_two_common_seeds_has_no_p(tmp_path: Path, configs: Configs):
    write_run(tmp_path, configs[HTM], 0)
    row = texts(tables_of(tmp_path, configs)[0][1], HTM)
    assert (row["difference"], row["p"]) == ("-", "none: needs 2 common seeds, has 0")
    assert row["top-1 last"] == "80.00"  # one value, no deviation


def test_cells_with_equal_configs_share_runs_of_any_name(tmp_path: Path, configs: Configs):
    write_run(tmp_path, configs[HTM], name="anything")
    tables, _ = tables_of(tmp_path, configs)
    same = [HTM, "table3/attention", "table4/full", "table5/mixup_cutmix_htm"]
    for experiment in same:
        assert record(tables[int(experiment[5])], experiment).runs == ("anything",)
    assert sum(bool(r.runs) for table in tables.values() for r in table.records) == len(same)
    assert any(", ".join(same) in note for note in tables[4].notes)


def test_runs_match_cells_despite_options_that_do_not_change_results(
    tmp_path: Path, configs: Configs
):
    config = configs[HTM]
    other = dataclasses.replace(
        config,
        device="cpu",
        output_root="elsewhere",
        dataset=dataclasses.replace(config.dataset, workers=17),
    )
    write_run(tmp_path, other, name="kept")
    assert record(tables_of(tmp_path, configs)[0][1], HTM).runs == ("kept",)


def test_short_runs_are_not_in_full_tables(tmp_path: Path, configs: Configs):
    write_run(tmp_path, shortened(configs)[HTM], name="short")
    tables, collection = tables_of(tmp_path, configs)
    assert not any(record.runs for table in tables.values() for record in table.records)
    assert "recipe.epochs=1 instead of 1510" in reasons(collection)["short"]
    short, _ = tables_of(tmp_path, shortened(configs), "short")
    assert record(short[1], HTM).runs == ("short",)


def test_summary_that_contradicts_its_config_is_refused(tmp_path: Path, configs: Configs):
    write_run(tmp_path, configs[HTM], name="cut", epochs=3)
    tables, collection = tables_of(tmp_path, configs)
    assert record(tables[1], HTM).runs == ()
    assert reasons(collection)["cut"] == "summary.json: finished, but after 3 of 1510 epochs"


@pytest.mark.parametrize("top1", [float("nan"), None, "82.0", True, 8250.0])
def test_finished_run_without_a_valid_top1_is_refused(tmp_path, configs, top1):
    write_run(tmp_path, configs[HTM], name="odd", top1_last=top1)
    tables, collection = tables_of(tmp_path, configs)
    assert record(tables[1], HTM).runs == ()
    reason = "holds NaN" if str(top1) == "nan" else "top1_last is"  # NaN is not JSON
    assert reason in reasons(collection)["odd"]


def test_only_full_tables_of_the_papers_data_have_no_warning(tmp_path: Path, configs: Configs):
    digits = configs[HTM].dataset
    swapped = {
        name: dataclasses.replace(c, dataset=dataclasses.replace(digits, name="digits"))
        for name, c in configs.items()
    }
    for number, table in tables_of(tmp_path, configs)[0].items():
        assert table.banner is None
        assert table.title.startswith(f"Table {number} at full scale")
    for table in tables_of(tmp_path, configs, "smoke")[0].values():
        assert "SMOKE SCALE" in (table.banner or "") and "smoke scale" in table.title
    for table in tables_of(tmp_path, swapped)[0].values():
        assert "DIGITS INSTEAD OF" in (table.banner or "")


def test_cells_without_runs_state_it(tmp_path: Path, configs: Configs):
    tables, _ = tables_of(tmp_path, configs)
    trained = [r for table in tables.values() for r in table.records if r.experiment]
    assert [r.experiment for r in trained if r.status == "not run"] != []
    assert {r.experiment for r in trained} == {cell.experiment for cell in read_cells()}
    assert len(trained) == 29 and all(r.status == "not run" and not r.spreads for r in trained)
    some = {
        name: config for name, config in configs.items() if not name.startswith("table1/cifar10_")
    }
    without, _ = tables_of(tmp_path, some)
    ours = {r.status for r in without[1].records if r.experiment and r.column == "CIFAR-10"}
    assert ours == {"no configuration at this scale"}


def test_quoted_rows_show_our_model_sizes(tmp_path: Path, configs: Configs):
    table = tables_of(tmp_path, configs)[0][1]
    quoted = [r for r in table.records if r.experiment is None]
    assert len(quoted) == 28  # 14 rows, CIFAR-10 and CIFAR-100
    (row,) = [r for r in quoted if r.row == "NesT-B" and r.column == "CIFAR-100"]
    shown = {column.title: column.text(row) for column in table.columns}
    assert (shown["status"], shown["top-1 paper"]) == ("quoted", "82.56")
    assert shown["params (M) / paper"] == "3.76 / 68.0"  # from COUNTS
    assert shown["MACs (G) / paper"] == "1.18 (0.95) / -"


def test_cells_of_several_columns_are_listed_once_without_printed_rows(
    tmp_path: Path, configs: Configs
):
    sources = dataclasses.replace(sources_of(tmp_path, configs), papers=())
    listed = [record.experiment for record in records_of(1, sources)]
    assert listed == [cell.experiment for cell in sources.cells if cell.table == 1]


def test_only_table_2_has_top_5(tmp_path: Path, configs: Configs):
    write_run(tmp_path, configs["table2/imagenet1k_htm"])
    tables, _ = tables_of(tmp_path, configs)
    row = texts(tables[2], "table2/imagenet1k_htm")
    assert (row["top-5 last"], row["top-5 best"], row["top-5 paper"]) == ("95.00", "96.00", "96.29")
    assert (row["top-5 last - paper"], row["top-5 best - paper"]) == ("-1.29", "-0.29")
    for number in (1, 3, 4, 5):
        assert not any("top-5" in column.title for column in tables[number].columns)


def test_run_is_running_while_a_process_holds_it(tmp_path: Path, configs: Configs, monkeypatch):
    write_run(tmp_path, configs[HTM], 1, status="running")
    monkeypatch.setattr("reproduction.runs.locking.is_held", lambda folder: True)
    tables, _ = tables_of(tmp_path, configs)
    assert record(tables[1], HTM).status == "seed 1 running"


def test_unfinished_and_failed_runs_are_listed_with_their_error(tmp_path: Path, configs: Configs):
    write_run(tmp_path, configs[HTM], 0)
    running = write_run(tmp_path, configs[HTM], 1, status="running")
    line = json.dumps({"step": 900, "epoch": 12, "loss": 1.0})
    (running / "metrics.jsonl").write_text(f'{line}\n{{"step": 901, "epo')
    write_run(tmp_path, configs[HTM], 2, name="bad", status="failed", error="Boom: at\nstep 3")
    (write_run(tmp_path, configs[HTM], 3) / "summary.json").unlink()
    tables, _ = tables_of(tmp_path, configs)
    cell = record(tables[1], HTM)
    assert cell.status == (
        "1 finished; seed 1 interrupted, in epoch 12 of 1510; seed 2 failed; seed 3 interrupted"
    )
    assert cell.seeds == (0,)
    (note,) = [note for note in tables[3].notes if "bad" in note]
    assert note == "Not counted: bad (table3/attention) is failed: Boom: at step 3"


def test_newest_finished_run_of_a_seed_counts(tmp_path: Path, configs: Configs):
    for name, seconds in (("a", 100), ("b", 300), ("c", 200), ("d", 400)):
        status = "failed" if name == "d" else "finished"
        set_time(write_run(tmp_path, configs[HTM], name=name, status=status), seconds)
    tables, collection = tables_of(tmp_path, configs)
    assert record(tables[1], HTM).runs == ("b",)
    assert record(tables[1], HTM).status == "1 finished"
    newest = "seed 0 again (finished): b is counted, the newer of the finished ones"
    assert reasons(collection) == {
        "a": newest,
        "c": newest,
        "d": "seed 0 again (failed): b is counted",
    }


def test_broken_folders_do_not_stop_the_tables(tmp_path: Path, configs: Configs):
    write_run(tmp_path, configs[HTM], name="good")
    contents = {
        "empty": {},
        "text": {"config.yaml": "just words"},
        "cut": {"config.yaml": "a: [1,"},
        "binary": {"config.yaml": b"\xff\xfe\x00"},
        "foreign": {"config.yaml": "learning_rate: 1\n"},
        "deep": {"config.yaml": "[" * 5000},
        "half": {"config.yaml": (tmp_path / "good/config.yaml").read_bytes(), "summary.json": "{"},
        "list": {"config.yaml": "seed: 1", "summary.json": "[]"},
        "strange": {"config.yaml": "seed: 1\nrecipe: 5\n2026-01-01: .nan\n"},
        "fin": {"config.yaml": "seed: 1\nrecipe: 5\n", "summary.json": '{"status": "finished"}'},
        "report": {"index.html": "ours"},
        "data": {"cifar10.txt": "stand-in images"},
        ".sweeps": {},
    }
    for name, files in contents.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            data = text if isinstance(text, bytes) else text.encode()
            (tmp_path / name / file).write_bytes(data)
    (tmp_path / "config.yaml").mkdir()
    (tmp_path / "isfolder").mkdir()
    (tmp_path / "isfolder" / "config.yaml").mkdir()
    tables, collection = tables_of(tmp_path, configs)
    assert record(tables[1], HTM).runs == ("good",)
    listed = reasons(collection)
    assert set(listed) == {*contents, "config.yaml", "isfolder"} - {"report", "data", ".sweeps"}
    assert all("\n" not in why and str(tmp_path) not in why for why in listed.values())
    assert listed["foreign"] == "is not a run folder: config.yaml holds no seed"


def test_collect_reads_a_trained_run(command: Command, tmp_path: Path):
    settings = [*SMALL, "recipe.epochs=1", "augmentation=[]"]
    assert command("train", *settings, "seed=3", "name=real").status == 0
    cell = config_of(*settings)
    collection = collect(tmp_path / "outputs", {"cell": cell})
    (run,) = collection.cells["cell"].finished.values()
    summary = json.loads((tmp_path / "outputs/real/summary.json").read_text())
    assert (run.folder, run.seed, collection.unused) == ("real", 3, ())
    assert run.result is not None
    assert run.result.accuracy == {key: summary[key] for key in METRICS}
    assert run.result.seconds == summary["seconds"] and run.result.devices == 1
