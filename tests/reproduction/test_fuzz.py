"""Random command lines; `--hypothesis-profile=long` runs 50 times as many."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.reproduction.conftest import SCRIPTS
from tests.reproduction.fuzz import check, command_lines

EXAMPLES = settings.default.max_examples // 5  # 20, or more by the chosen profile
FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=EXAMPLES, suppress_health_check=FIXTURES)
@given(script=st.sampled_from(list(SCRIPTS)), arguments=command_lines())
def test_command_lines_build_or_are_refused_in_one_line(
    script: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    check(script, arguments, tmp_path)
