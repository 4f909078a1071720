"""The notes of tables on their t-tests."""

from pathlib import Path

from reproduction.reporting.tables import significance
from tests.reproduction.tables import Configs, tables_of, write_run

BASELINE = {0: 70.0, 1: 71.0, 2: 72.0, 3: 73.0}
CLEAR = {0: 75.1, 1: 76.0, 2: 77.0, 3: 78.2}  # p = 2e-06
SLIGHT = {
    0: 70.3,
    1: 71.7,
    2: 73.0,
    3: 74.1,
}  # p = 0.02, not significant in four tests
NONE = {0: 71.0, 1: 70.5, 2: 72.4, 3: 72.8}


def write(outputs: Path, configs: Configs, values: dict[str, dict[int, float]]) -> None:
    for experiment, by_seed in values.items():
        for seed, top1 in by_seed.items():
            write_run(outputs, configs[experiment], seed, top1=top1)


def notes(outputs: Path, configs: Configs, number: int) -> list[str]:
    table = tables_of(outputs, configs)[0][number]
    texts = list(significance(table.records, "the baseline"))
    assert all(text in table.notes for text in texts)
    return texts


def test_note_names_significant_and_other_differences(tmp_path: Path, configs: Configs):
    values = {"full": BASELINE, "without_scorenet": CLEAR, "without_assignment": SLIGHT}
    values |= {"without_tokens": NONE, "without_labels": SLIGHT | {0: 69.9}}
    write(tmp_path, configs, {f"table4/{name}": by_seed for name, by_seed in values.items()})
    assert notes(tmp_path, configs, 4) == [
        "Significant at 5 % against the baseline: without ScoreNet +5.07 (p = 1.9e-06); without "
        "optimal assignment +0.77 (p = 0.023). Not significant: without token-level mixup +0.18 "
        "(p = 0.635); without saliency-based labels +0.68 (p = 0.089). 4 tests; "
        "significant after Holm's correction: without ScoreNet."
    ]


def test_note_lists_rows_without_a_test_and_the_reason(tmp_path: Path, configs: Configs):
    values = {"mixup_cutmix": BASELINE, "mixup_cutmix_htm": CLEAR, "mixup_cutmix_vtm": BASELINE}
    values |= {"none": {0: 60.0}, "htm": {0: 61.0}, "vtm": {0: 62.0}}
    write(tmp_path, configs, {f"table5/{name}": by_seed for name, by_seed in values.items()})
    (note,) = notes(tmp_path, configs, 5)
    assert "1 test; significant after Holm's correction: + mixup, CutMix, HTM." in note
    assert note.endswith(
        "Not tested (needs 2 common seeds, has 1): + HTM; + VTM. "
        "Not tested (values are identical): + mixup, CutMix, VTM."
    )


def test_table_of_one_seed_has_no_verdict(tmp_path: Path, configs: Configs):
    write(tmp_path, configs, {"table5/none": {0: 60.0}, "table5/htm": {0: 61.0}})
    assert notes(tmp_path, configs, 5) == ["Not tested (needs 2 common seeds, has 1): + HTM."]
    assert notes(tmp_path, configs, 2) == []


def test_note_distinguishes_rows_of_several_columns(tmp_path: Path, configs: Configs):
    for data in ("cifar10", "cifar100"):
        cells = {f"table1/{data}_baseline": BASELINE, f"table1/{data}_vtm": CLEAR}
        write(tmp_path, configs, cells)
    (note,) = notes(tmp_path, configs, 1)
    assert "+ VTM on CIFAR-10 +5.07" in note and "+ VTM on CIFAR-100 +5.07" in note
