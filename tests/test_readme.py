"""The README's commands compose and its code runs."""

import re
import shlex
from pathlib import Path

import pytest

from reproduction import cli
from reproduction.compose import compose
from reproduction.parse import parse

README = (Path(__file__).parents[1] / "README.md").read_text()
COMMANDS = re.findall(r"^python train\.py (.*)$", README, flags=re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_train_commands_of_the_readme_are_valid(command: str, tmp_path: Path):
    for split in ("train", "val"):
        (tmp_path / split / "class").mkdir(parents=True)
    args = shlex.split(command.replace("path/to/images", str(tmp_path)), comments=True)
    points = cli._points("train", args)
    assert points
    for point in points:
        parse(compose("train", point).raw)


def test_the_readme_shows_commands():
    assert len(COMMANDS) >= 6


def test_python_code_of_the_readme_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})


def test_every_option_of_the_readme_exists():
    for group, options in re.findall(r"^\| `(\w+)` \| (.*) \|$", README, flags=re.MULTILINE):
        known = {str(p.stem) for p in (Path(__file__).parents[1] / "conf" / group).rglob("*.yaml")}
        if group in ("model", "dataset", "recipe"):
            outside_brackets = re.sub(r"\([^)]*\)", "", options)
            assert set(re.findall(r"`(\w+)`", outside_brackets)) == known
