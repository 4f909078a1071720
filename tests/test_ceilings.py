"""How much of the project there may be. A ceiling may fall; who needs more deletes first."""

import ast
from pathlib import Path

import pytest

from reproduction.start import allowed
from tests.doors import ROOT

ROOMS = {  # files -> lines, public names of the modules
    "src/tokenmixup/*.py": (2400, 120),
    "src/reproduction/training/*.py": (1900, 85),
    "src/reproduction/models/*.py": (650, 45),
    "src/reproduction/data/*.py": (900, 60),
    "src/reproduction/studies/*.py": (850, 65),
    "src/reproduction/reporting/*.py": (700, 40),
    "src/reproduction/*.py *.py": (1450, 125),
    "scripts/*.py": (800, 37),
}
TEXTS = {  # files -> lines
    "tests/**/*.py tests/**/*.yaml": 10_500,
    "conf/**/*.yaml docs/*.yaml results/*.yaml src/**/*.yaml": 1600,
    "*.md docs/*.md": 1600,
}


def files(patterns: str) -> list[Path]:
    """Those that are written by hand."""
    found = [path for pattern in patterns.split() for path in ROOT.glob(pattern)]
    return [path for path in found if path != ROOT / "docs/results.md"]


def lines(patterns: str) -> int:
    return sum(path.read_text().count("\n") for path in files(patterns))


def public_names(patterns: str) -> set[tuple[str, str]]:
    """File and name of what the modules define."""
    found = set()
    for path in files(patterns):
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", 0)]
            stored = [x.id for y in targets if y for x in ast.walk(y) if isinstance(x, ast.Name)]
            found |= {(str(path), x) for x in (*stored, getattr(node, "name", "_")) if x[0] != "_"}
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_stays_below_its_ceilings(room: str):
    most_lines, most_names = ROOMS[room]
    assert lines(room) <= most_lines and len(public_names(room)) <= most_names


def test_texts_keys_and_refusals_stay_below_their_ceilings():
    for patterns, most in TEXTS.items():
        assert lines(patterns) <= most, patterns
    assert len(allowed()) <= 98
    code = [path.read_text() for patterns in ROOMS for path in files(patterns)]
    assert sum(text.count("raise UserError") for text in code) <= 60
