"""The names on the pages of docs/ exist."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
FUNCTIONS = sorted(
    {name for page in PAGES for name in re.findall(r"`(tokenmixup\.\w+\.\w+)`", page.read_text())}
)
TESTS = sorted(
    {name for page in PAGES for name in re.findall(r"`(tests/[\w/]+\.py::\w+)`", page.read_text())}
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_the_pages_exist(name: str):
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", TESTS)
def test_tests_of_the_pages_exist(name: str):
    file, _, function = name.partition("::")
    defined = ast.parse((ROOT / file).read_text()).body
    assert function in [node.name for node in defined if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("equation", range(1, 14))
def test_every_equation_is_on_the_map(equation: int):
    assert re.search(rf"^\| Eq\. {equation}\b", (ROOT / "docs/method.md").read_text(), re.M)


@pytest.mark.parametrize("line", range(1, 9))
def test_every_line_of_algorithm_1_is_on_the_map(line: int):
    assert re.search(rf"^\| {line} \|", (ROOT / "docs/method.md").read_text(), re.M)


def test_the_map_names_functions_and_tests():
    assert len(FUNCTIONS) > 15 and len(TESTS) > 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_finished(page: Path):
    assert not re.search(r"@[A-Z]+@|TODO|TBD", page.read_text())
