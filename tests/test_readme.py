"""Commands in README and docs/ compose, their links resolve, and the README's code runs."""

import re
import shlex
from pathlib import Path

import pytest

from reproduction.runs.compose import compose
from reproduction.runs.parse import parse
from reproduction.start import command as cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [README, *(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))]
COMMANDS = sorted(
    {text for page in PAGES for text in re.findall(r"^python train\.py (\S.*[^\\])$", page, re.M)}
)


@pytest.mark.parametrize("command", COMMANDS)
def test_train_commands_are_valid(command: str, tmp_path: Path):
    for folder in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (tmp_path / folder).mkdir(parents=True)
    args = shlex.split(command.replace("path/to/images", str(tmp_path)), comments=True)
    points = cli._points("train", cli._parse_arguments(args))
    assert points
    for point in points:
        parse(compose("train", point).raw, needs_data="imagenet" not in command)


def test_pages_show_commands():
    assert len(COMMANDS) >= 8


def test_readme_code_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})


def test_links_resolve():
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)]+)\)", path.read_text()):
            file, _, heading = link.partition("#")
            target = path.parent / file if file else path
            assert target.exists(), (path.name, link)
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if heading else []
            plain = [re.sub(r"[^\w -]", "", x).lower() for x in headings]  # as on GitHub
            assert heading in ["", *(x.replace(" ", "-") for x in plain)], link


def test_readme_stays_short():
    assert len(README.splitlines()) <= 110
