"""Properties of tables, over small studies, overrides and seeds."""

import contextlib
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.programs import Run, assert_succeeded, cells, report_name, script
from tests.reproduction.finished import write

TAU = "augmentation.htm.tau"
RHO = "augmentation.htm.rho"
LIMIT = "dataset.limit"
EPOCHS = "recipe.epochs"
ROWS = {"low": ["recipe.lr=0.001"], "high": ["recipe.lr=0.002"], "swept": ["recipe.lr=0.003,0.004"]}
WORDS = ("recipe.weight_decay=0.1", "recipe.weight_decay=0.2", "model.drop_path=0.1", "device=cpu")


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield


# --- names of files ------------------------------------------------------------------------------

COMMANDS = st.tuples(
    st.sampled_from(["a/mine.yaml", "b/mine.yaml"]),
    st.sets(st.sampled_from(sorted(ROWS)), min_size=1),
    st.sampled_from([None, 1, 3]),
    st.sampled_from(["full", "smoke"]),
    st.permutations(WORDS).flatmap(lambda x: st.integers(0, 2).map(lambda n: tuple(x[:n]))),
)


def of(command: Any) -> Any:
    """What the files of a command are of. Its study has three seeds, at smoke scale one."""
    path, rows, seeds, scale, words = command
    default = 3 if scale == "full" else 1
    last = {word.partition("=")[0]: word for word in words if word != "device=cpu"}
    return path, rows, seeds or default, scale, last


@settings(max_examples=10)
@given(COMMANDS, COMMANDS, st.integers(0, 5))
def test_names_are_equal_exactly_if_what_they_are_of_is(one: Any, other: Any, same: int):
    """Two commands that have all parts in common but one, or the same words in another order."""
    if same < len(one):
        changed = [*one]
        changed[same] = other[same]
        other = tuple(changed)
    names = []
    with elsewhere():
        for path, rows, seeds, scale, words in (one, other):
            Path(path).parent.mkdir(exist_ok=True)
            study = {"title": "Mine", "rows": {name: ROWS[name] for name in sorted(rows)}}
            Path(path).write_text(yaml.safe_dump(study))
            names.append(report_name(path, seeds, scale, words))
    assert (names[0] == names[1]) == (of(one) == of(other))


def test_the_papers_names_are_of_its_whole_studies_alone():
    assert report_name("table4", None, "full") == "table4"
    others = {
        report_name("table4", 1, "full"),
        report_name("table4/full", None, "full"),
        report_name("table4", None, "smoke"),
        report_name("table4", None, "full", "recipe.epochs=3"),
    }
    assert len(others) == 4
    assert "table4" not in others
    with elsewhere():
        Path("table4.yaml").write_text(yaml.safe_dump({"title": "Mine", "rows": ROWS}))
        assert report_name("table4.yaml", None, "full") != "table4"


# --- comparisons ---------------------------------------------------------------------------------

GRID = [
    {TAU: tau, RHO: rho, LIMIT: limit, EPOCHS: epochs}
    for tau, rho, limit, epochs in product((1.0, 2.0), (0.0, "auto"), (None, 60), (1, 2))
]


@settings(max_examples=8)
@given(st.sets(st.integers(0, len(GRID) - 1), min_size=2, max_size=6))
def test_rows_that_are_compared_differ_in_the_named_key_alone(model: Run, places: set[int]):
    """The accuracies are powers of two, so that a difference tells its pair of rows."""
    rows = [GRID[place] for place in sorted(places)]
    assume({row[TAU] for row in rows} == {1.0, 2.0})
    with elsewhere():
        for number, row in enumerate(rows):
            write(model, str(number), row, top1_last=float(2**number))
        result = script("runs", "outputs", "--against", "tau=1", "--csv", "numbers.csv")
        assert_succeeded(result)
        numbers = pd.read_csv("numbers.csv")
    assert len(numbers) == len(rows)
    found = set()
    for line in numbers[numbers.difference.notna()].to_dict("records"):
        ours = round(line["mean"])
        found.add((ours, round(ours - line["difference"])))
    expected = set()
    for (i, row), (j, base) in product(enumerate(rows), enumerate(rows)):
        differing = [key for key in row if row[key] != base[key]]
        if differing == [TAU] and base[TAU] == 1:
            expected.add((2**i, 2**j))
    assert found == expected
    alone = [row[TAU] for row in rows].count(2.0) - len(expected)
    assert (f"not compared: {alone}" in result.out) == (alone > 0)
    titles, *lines = cells(result.out)
    shown = [tuple(line[: titles.index("n")]) for line in lines]
    assert len({*shown}) == len(rows)


# --- planned rows --------------------------------------------------------------------------------
