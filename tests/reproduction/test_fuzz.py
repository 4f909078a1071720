"""Random command lines and damaged run folders; `--hypothesis-profile=long` runs many more."""

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reproduction.runs.folder import RunFolder
from reproduction.studies.runs import METRICS, newest, read_runs
from tests.reproduction.conftest import SCRIPTS, SMALL, Command
from tests.reproduction.fuzz import check, command_lines
from tests.reproduction.mutations import KINDS, TRAP, mutate, snapshot
from tests.reproduction.tables import Configs, write_metrics, write_run

HTM = "table1/cifar100_htm"
EXAMPLES = settings.default.max_examples  # 100, or more by the chosen profile
FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=EXAMPLES // 2, suppress_health_check=FIXTURES)
@given(script=st.sampled_from(list(SCRIPTS)), arguments=command_lines())
def test_command_lines_build_or_are_refused_in_one_line(
    script: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    check(script, arguments, tmp_path)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory, configs: Configs) -> Path:
    """Two finished runs of one cell."""
    outputs = tmp_path_factory.mktemp("intact") / "outputs"
    outputs.mkdir()
    for seed in (0, 1):
        run = write_run(outputs, configs[HTM], seed, name=f"run{seed}")
        write_metrics(run / "metrics.jsonl", [[(6, 60.0, 4.35), (90, 62.0, 2.4)]] * 12)
    return outputs


@pytest.mark.parametrize("start", range(0, EXAMPLES * 3 // 10, len(KINDS)))
def test_damaged_run_is_collected_unchanged_or_listed_with_the_reason(
    start: int, intact: Path, tmp_path: Path, configs: Configs, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    undamaged = read_runs(intact).set_index("folder").loc["run1"]
    for seed in range(start, start + len(KINDS)):
        outputs = tmp_path / str(seed)
        shutil.copytree(intact, outputs)
        damage = seed, *mutate(outputs / "run1", seed)
        before = snapshot(outputs)
        runs = read_runs(outputs)
        found = runs[runs.folder == "run1"]
        counted = newest(runs)
        counted = counted[(counted.folder == "run1") & (counted.key == undamaged.key)]
        if len(counted):
            assert (counted[[*METRICS]].iloc[0] == undamaged[[*METRICS]]).all(), damage
        elif (outputs / "run1").is_dir():
            assert len(found) == 1, damage
            assert all(text.isprintable() for text in found.error.dropna()), damage
        assert snapshot(outputs) == before, damage
    assert not (tmp_path / TRAP).exists()


def test_damaged_run_resumes_correctly_or_is_refused_unchanged(command: Command, tmp_path: Path):
    args = [*SMALL, "name=mine", "augmentation=[]", "recipe.epochs=1"]
    assert command("train", *args).status == 0
    run = RunFolder(tmp_path / "outputs" / "mine")
    expected = run.read_summary()["top1_last"]
    run.write_summary(status="interrupted")
    shutil.move(run.path, tmp_path / "intact")
    for seed in range(EXAMPLES // 6):
        shutil.copytree(tmp_path / "intact", run.path)
        damage = seed, *mutate(run.path, seed)
        before = snapshot(run.path)
        result = command("train", *args, "resume=auto")
        if result.status == 0:
            assert run.read_summary()["top1_last"] == expected, damage
        else:
            assert (result.status, len(result.lines)) == (2, 1), (damage, result.err)
            assert snapshot(run.path) == before, damage
        shutil.rmtree(run.path)
