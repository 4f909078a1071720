"""The tables of docs/ hold what conf/, the composed experiments and results/ hold."""

from typing import Any

import yaml

from reproduction.config import CONF_DIR, ROOT
from reproduction.errors import as_typed
from reproduction.identity import changes_result, flat
from reproduction.studies.published import results_page
from tests.pages import section
from tests.programs import Overrides, cells, dry, overrides_of

DOCS = ROOT / "docs"
# Besides where and how a run is made, which `changes_result` leaves out.
LEFT_OUT = overrides_of("""
    model.name model.family model.weights model.htm_layer model.vtm_layer
    dataset.name dataset.source dataset.root recipe.log_every recipe.evaluate_every
""")
CCT_300 = overrides_of("""
    model=cct_7_3x1 dataset=cifar10 recipe=cifar10_cct_300 augmentation=[mixup,cutmix]
    augmentation.off_epoch=175
""")


def experiments() -> dict[str, Overrides]:
    """Those of the paper's first two tables, and as the published code trains them."""
    found: dict[str, Overrides] = {"cct_300": CCT_300}
    for folder in ("table1", "table2", "published"):
        for path in (CONF_DIR / "experiment" / folder).glob("*.yaml"):
            name = f"{folder}/{path.stem}"
            found[name] = f"experiment={name}"
    return found


def settings(overrides: Overrides) -> dict[str, str]:
    values, _ = dry(overrides)
    stack = {name: part for name, part in values["augmentation"].items() if part is not None}
    found = {}
    for key, value in flat(values | {"augmentation": stack}):
        if changes_result(key) and key not in LEFT_OUT:
            found[key] = text(value)
    return found


def text(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(text, value))}]"
    if value is None:
        return "null"
    return as_typed(value)


def recipes() -> list[tuple[str, dict[str, Any]]]:
    """Returns the rows of docs/recipes.yaml with their keys, all values as text."""
    content = yaml.load((DOCS / "recipes.yaml").read_text(), yaml.BaseLoader)  # noqa: S506 - ours
    return [(key, row) for key, rows in content.items() for row in rows]


def test_recipes_are_those_that_the_table_compares_with_the_published_ones():
    """A failure means: the row of docs/recipes.yaml with this key needs the new value."""
    table = recipes()
    used = set()
    for experiment, overrides in experiments().items():
        folder, _, name = experiment.partition("/")
        places = {experiment, folder, name.partition("_")[0]}
        listed = {}
        for place, (key, row) in enumerate(table):
            if not places.isdisjoint(row["in"]):
                listed[key, text(row["here"])] = place
        for key, value in settings(overrides).items():
            assert (key, value) in listed, f"{experiment}: {key}={value}"
            used.add(listed[key, value])
    assert len(used) == len(table) > 100


def test_differences_page_gives_the_reasons_of_the_values_that_differ():
    """A failure means: the table of docs/paper.md needs the row of docs/recipes.yaml."""
    page = section((DOCS / "paper.md").read_text(), "### Recipes")
    rows = [row for row in cells(page) if row[0].startswith("`")]
    differing = []
    for key, row in recipes():
        differs = row.get("published", row["here"]) != row["here"]
        assert ("why" in row) == differs, key
        if differs:
            where = ", ".join(row["in"])
            differing.append([f"`{key}`", where, row["published"], row["here"], row["why"]])
    assert rows == differing
    assert rows


def test_results_page_is_current():
    page = (DOCS / "results.md").read_text()
    assert page == results_page(ROOT / "results"), "python -m scripts.results updates it"
