"""The tables of docs/ hold what conf/, the composed experiments and results/ hold."""

from typing import Any

import yaml

from reproduction.config import CONF_DIR, ROOT
from reproduction.identity import changes_result, flat
from reproduction.studies.published import results_page
from reproduction.studies.text import value_text
from tests.doors import dry

DOCS = ROOT / "docs"
LEFT_OUT = (  # besides where and how a run is made, which `changes_result` leaves out
    *("model.name", "model.family", "model.weights", "model.htm_layer", "model.vtm_layer"),
    *("dataset.name", "dataset.source", "recipe.log_every", "recipe.evaluate_every"),
)
EXPERIMENTS = {  # of the paper's first two tables, and as the published code trains them
    f"{folder}/{path.stem}": [f"experiment={folder}/{path.stem}"]
    for folder in ("table1", "table2", "published")
    for path in sorted((CONF_DIR / "experiment" / folder).glob("*.yaml"))
} | {
    "cct_300": [
        *("model=cct_7_3x1", "dataset=cifar10", "recipe=cifar10_cct_300"),
        *("augmentation=[mixup,cutmix]", "augmentation.off_epoch=175"),
    ]
}


def settings(overrides: list[str]) -> dict[str, str]:
    values = dry(*overrides)[0]
    stack = {name: part for name, part in values["augmentation"].items() if part is not None}
    every = dict(flat(values | {"augmentation": stack}))
    left_out = (*LEFT_OUT, "dataset.root")
    return {key: text(x) for key, x in every.items() if changes_result(key) and key not in left_out}


def text(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(text, value))}]"
    return "null" if value is None else value_text(value)


def recipes() -> list[tuple[str, dict[str, Any]]]:
    """Returns the rows of docs/recipes.yaml with their keys, all values as text."""
    content = yaml.load((DOCS / "recipes.yaml").read_text(), yaml.BaseLoader)  # noqa: S506 - ours
    return [(key, row) for key, rows in content.items() for row in rows]


def test_recipes_are_those_that_the_table_compares_with_the_published_ones():
    """A failure means: the row of docs/recipes.yaml with this key needs the new value."""
    table = recipes()
    used = set()
    for experiment, overrides in EXPERIMENTS.items():
        folder, _, name = experiment.partition("/")
        places = {experiment, folder, name.partition("_")[0]}
        listed = {
            (key, text(row["here"])): place
            for place, (key, row) in enumerate(table)
            if places & {*row["in"]}
        }
        for key, value in settings(overrides).items():
            assert (key, value) in listed, f"{experiment}: {key}={value}"
            used.add(listed[key, value])
    assert len(used) == len(table) > 100


def test_differences_page_gives_the_reasons_of_the_values_that_differ():
    """A failure means: the table of docs/paper.md needs the row of docs/recipes.yaml."""
    page = (DOCS / "paper.md").read_text().partition("### Recipes")[2].partition("\n### ")[0]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    differing = []
    for key, row in recipes():
        assert ("why" in row) == (row.get("published", row["here"]) != row["here"]), key
        if "why" in row:
            where = ", ".join(row["in"])
            differing.append([f"`{key}`", where, row["published"], row["here"], row["why"]])
    assert rows == differing != []


def test_results_page_is_current():
    page = (DOCS / "results.md").read_text()
    assert page == results_page(ROOT / "results"), (
        "python -m scripts.report --results results updates it"
    )
