"""Commands in README and docs/ compose, their links resolve, and the README's code runs."""

import re
import shlex
from pathlib import Path

import pytest

from tests.doors import train

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [README, *(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))]
COMMANDS = sorted(
    {text for page in PAGES for text in re.findall(r"^python train\.py (\S.*[^\\])$", page, re.M)}
)


@pytest.mark.parametrize("command", COMMANDS)
def test_train_commands_are_valid(command: str, here: Path):
    result = train(*shlex.split(command, comments=True), "dry_run=1")
    assert result.status == 0 and "not started" in result.out, result.err


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
