"""Recipes differ from the published ones only for stated reasons, and pages are up to date."""

import copy
from typing import Any

import pytest

from reproduction.reporting.recipes import Setting, applies, compare_recipes, read_recipes
from reproduction.studies.publish import results_page
from scripts.write_docs import (
    CONFIGURATION,
    DIFFERENCES,
    RESULTS,
    configuration_page,
    differences_page,
    experiments,
)

RECIPES = read_recipes()


@pytest.fixture(scope="module")
def settings() -> list[Setting]:
    return compare_recipes(RECIPES, experiments())


def unexplained(settings: list[Setting]) -> list[Setting]:
    return [x for x in settings if not x.is_equal and not x.why]


def idle_reasons(settings: list[Setting], recipes: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the reasons that apply to no difference."""
    return [
        reason
        for reason in recipes["reasons"]
        if not any(
            x.key == reason["key"] and applies(reason, x.experiment) and not x.is_equal
            for x in settings
        )
    ]


def test_every_difference_has_a_reason(settings: list[Setting]):
    assert unexplained(settings) == []
    assert any(x.why for x in settings)


def test_every_reason_explains_a_difference(settings: list[Setting]):
    assert idle_reasons(settings, RECIPES) == []
    assert [x for x in settings if x.why and x.is_equal] == []


def test_published_values_belong_to_existing_settings(settings: list[Setting]):
    for entry in RECIPES["published"]:
        known = {x.key for x in settings if applies(entry, x.experiment)}
        assert set(entry["values"]) <= known, entry["in"]
    assert set(RECIPES["ours_alone"]) <= {x.key for x in settings if x.published == "not stated"}


def test_changed_values_and_superfluous_reasons_are_noticed():
    configs = experiments()
    changed, superfluous = copy.deepcopy(RECIPES), copy.deepcopy(RECIPES)
    changed["published"][0]["values"]["recipe.batch_size"] = 256
    assert {x.key for x in unexplained(compare_recipes(changed, configs))} == {"recipe.batch_size"}
    superfluous["reasons"].append({"key": "recipe.lr", "in": ["table1/*"], "why": "-"})
    compared = compare_recipes(superfluous, configs)
    assert [x["key"] for x in idle_reasons(compared, superfluous)] == ["recipe.lr"]


def test_written_pages_are_current():
    hint = "python scripts/write_docs.py updates it"
    assert CONFIGURATION.read_text() == configuration_page(), hint
    assert DIFFERENCES.read_text() == differences_page(), hint
    assert RESULTS.read_text() == results_page(), hint
