"""Random command lines and damaged run folders; `--hypothesis-profile=long` runs many more."""

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reproduction.runs.folder import RunFolder
from tests.reproduction.conftest import SCRIPTS, SMALL, Command
from tests.reproduction.fuzz import check, command_lines
from tests.reproduction.mutations import mutate, snapshot

EXAMPLES = settings.default.max_examples  # 100, or more by the chosen profile
FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=EXAMPLES // 5, suppress_health_check=FIXTURES)
@given(script=st.sampled_from(list(SCRIPTS)), arguments=command_lines())
def test_command_lines_build_or_are_refused_in_one_line(
    script: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    check(script, arguments, tmp_path)


def test_damaged_run_resumes_correctly_or_is_refused_unchanged(command: Command, tmp_path: Path):
    args = [*SMALL, "name=mine", "augmentation=[]", "recipe.epochs=1"]
    assert command("train", *args).status == 0
    run = RunFolder(tmp_path / "outputs" / "mine")
    expected = run.read_summary()["top1_last"]
    run.write_summary(status="interrupted")
    shutil.move(run.path, tmp_path / "intact")
    for seed in range(EXAMPLES // 12):
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
