"""The tables of docs/ hold what conf/, the composed experiments and results/ hold."""

import dataclasses
import re
from collections.abc import Iterator

from reproduction.config import CONF_DIR, ROOT
from reproduction.runs.identity import settings_of
from reproduction.studies.publish import results_page
from reproduction.studies.sweeps import value_text
from tests.reproduction.conftest import config_of

DOCS = ROOT / "docs"
LEFT_OUT = (  # besides where and how a run is made, which `settings_of` leaves out
    *("model.name", "model.family", "model.weights", "model.htm_layer", "model.vtm_layer"),
    *("dataset.name", "dataset.broken_images", "recipe.log_every", "recipe.evaluate_every"),
)
EXPERIMENTS = [  # of the paper's first two tables, and as the published code trains them
    f"{folder}/{path.stem}"
    for folder in ("table1", "table2", "published")
    for path in sorted((CONF_DIR / "experiment" / folder).glob("*.yaml"))
]


def rows_of(page: str) -> Iterator[list[str]]:
    """Yields the cells of the rows that begin with a key."""
    for line in page.splitlines():
        if line.startswith("| `"):
            yield [cell.replace(r"\|", "|") for cell in re.split(r" (?<!\\)\| ", line[2:-2])]


def settings(experiment: str) -> dict[str, str]:
    values = dataclasses.asdict(config_of(f"experiment={experiment}", needs_data=False))
    stack = {name: part for name, part in values["augmentation"].items() if part is not None}
    every = settings_of(values | {"augmentation": stack})
    return {key: text(value) for key, value in every.items() if key not in LEFT_OUT}


def text(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(text, value))}]"
    return "null" if value is None else value_text(value)


def test_recipes_are_those_that_the_table_compares_with_the_published_ones():
    """A failure means: the row of docs/differences.md with this key needs the new value."""
    page = (DOCS / "differences.md").read_text().partition("## Recipes")[2]
    table = list(rows_of(page.partition("\n## ")[0]))
    used = set()
    for experiment in EXPERIMENTS:
        data = experiment.partition("/")[2].partition("_")[0]
        listed = {
            (key.strip("`"), here): place
            for place, (key, where, _, here, _) in enumerate(table)
            if {experiment, data} & {*where.split(", ")}
        }
        for key, value in settings(experiment).items():
            assert (key, value) in listed, f"{experiment}: {key}={value}"
            used.add(listed[key, value])
    assert len(used) == len(table) > 100
    for key, _, published, here, verdict in table:
        expected = "equal" if published == here else "ours only" * (published == "not stated")
        assert verdict == expected or (published != here and len(verdict) > 9), key


def test_results_page_is_current():
    page = (DOCS / "results.md").read_text()
    assert page == results_page(), "python scripts/write_docs.py updates it"
