"""README, docs/: commands compose, code runs, links resolve, and what they name exists."""

import ast
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

from tests.doors import ROOT, train

PATHS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {path: path.read_text() for path in PATHS}


def found(pattern: str) -> list[str]:
    """The different matches in all pages."""
    return sorted({x for text in PAGES.values() for x in re.findall(pattern, text, re.M)})


COMMANDS = found(r"^python train\.py (\S.*[^\\])$")


@pytest.mark.parametrize("command", COMMANDS)
def test_train_commands_are_valid(command: str, here: Path):
    result = train(*shlex.split(command, comments=True), "dry_run=1")
    assert result.status == 0 and "not started" in result.out, result.err
    is_of_the_reader = "dataset.source=" in command  # a file that lies beside train.py
    assert ("not here: dataset.source=" in result.out) == is_of_the_reader


def test_readme_code_runs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGES[ROOT / "README.md"], re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})


def test_links_resolve():
    for path, text in PAGES.items():
        for link in re.findall(r"\]\(([^)]+)\)", text):
            file, _, heading = link.partition("#")
            target = path.parent / file if file else path
            assert target.exists(), (path.name, link)
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if heading else []
            plain = [re.sub(r"[^\w -]", "", x).lower() for x in headings]  # as on GitHub
            assert heading in ["", *(x.replace(" ", "-") for x in plain)], link


def test_functions_and_tests_that_are_named_exist():
    names = found(r"`((?:tokenmixup|reproduction)(?:\.\w+)+)`")  # also of methods
    tests = found(r"`(tests/[\w/]+\.py::\w+)`")
    assert min(len(COMMANDS), len(names) - 7, len(tests) - 7) >= 8  # the patterns still match
    for name in names:
        pkgutil.resolve_name(name)  # or it raises
    for name in tests:
        file, _, function = name.partition("::")
        defined = ast.parse((ROOT / file).read_text()).body
        assert function in [x.name for x in defined if isinstance(x, ast.FunctionDef)], name


def test_the_page_of_the_paper_lists_every_equation_and_every_line_of_algorithm_1():
    page = PAGES[ROOT / "docs/paper.md"]
    for row in (*(rf"Eq\. {x}\b" for x in range(1, 14)), *(rf"{x} \|" for x in range(1, 9))):
        assert re.search(rf"^\| {row}", page, re.M), row
