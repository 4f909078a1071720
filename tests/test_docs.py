"""Names mentioned in docs/ and CONTRIBUTING.md exist."""

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
def test_documented_functions_exist(name: str):
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", TESTS)
def test_cited_tests_exist(name: str):
    file, _, function = name.partition("::")
    defined = ast.parse((ROOT / file).read_text()).body
    assert function in [node.name for node in defined if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("equation", range(1, 14))
def test_method_page_lists_every_equation(equation: int):
    assert re.search(rf"^\| Eq\. {equation}\b", (ROOT / "docs/paper.md").read_text(), re.M)


@pytest.mark.parametrize("line", range(1, 9))
def test_method_page_lists_every_line_of_algorithm_1(line: int):
    assert re.search(rf"^\| {line} \|", (ROOT / "docs/paper.md").read_text(), re.M)


def test_pages_mention_functions_and_tests():
    assert len(FUNCTIONS) > 15 and len(TESTS) > 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_no_placeholders(page: Path):
    assert not re.search(r"@[A-Z]+@|TODO|TBD", page.read_text())
