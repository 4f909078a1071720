"""README, docs/: commands compose, code runs, links resolve, and what they name exists."""

import ast
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

from tests.pages import codes
from tests.programs import ROOT, assert_succeeded, train

DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))
PAGES = {path: path.read_text() for path in (ROOT / "README.md", *DOCUMENTS)}


def found(pattern: str) -> list[str]:
    """The different matches in all pages, whose commands are lines."""
    text = re.sub(r" \\\n *", " ", "\n".join(PAGES.values()))
    matches = re.findall(pattern, text, re.MULTILINE)
    return sorted(set(matches))


COMMANDS = [
    command
    for command in found(r"^(?:python|srun .*) train\.py (\S.*)$")
    if not re.search("--config-dir|sweeper=optuna", command)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_train_commands_are_valid(command: str, here: Path):
    result = train(shlex.split(command, comments=True), "dry_run=1")
    assert_succeeded(result, "not started")


def test_readme_code_runs():
    (code,) = codes(PAGES[ROOT / "README.md"])
    exec(compile(code, "README.md", "exec"), {})


def anchors(text: str) -> list[str]:
    """The names of the headings of a page, as on GitHub."""
    names = []
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w -]", "", heading)
        names.append(plain.lower().replace(" ", "-"))
    return names


def test_links_resolve():
    for path, text in PAGES.items():
        for link in re.findall(r"\]\(([^)]+)\)", text):
            file, _, anchor = link.partition("#")
            target = path
            if file:
                target = path.parent / file
            assert target.exists(), (path.name, link)
            if anchor:
                assert anchor in anchors(target.read_text()), link


def test_functions_and_tests_that_are_named_exist():
    names = found(r"`((?:tokenmixup|reproduction)(?:\.\w+)+)`")  # also of methods
    tests = found(r"`(tests/[\w/]+\.py::\w+)`")
    assert len(names) >= 15  # the patterns still match
    assert len(tests) >= 15
    assert len(COMMANDS) >= 8
    for name in names:
        pkgutil.resolve_name(name)  # or it raises
    for name in tests:
        file, _, function = name.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        assert function in [x.name for x in tree.body if isinstance(x, ast.FunctionDef)], name


def test_the_page_of_the_paper_lists_every_equation_and_every_line_of_algorithm_1():
    page = PAGES[ROOT / "docs/paper.md"]
    for number in range(1, 14):
        assert re.search(rf"^\| Eq\. {number}\b", page, re.MULTILINE), number
    for number in range(1, 9):
        assert re.search(rf"^\| {number} \|", page, re.MULTILINE), number
