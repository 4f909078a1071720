"""docs/results.md agrees with results/*.jsonl by statistics without the code of the tables."""

import json
import re
from functools import cache
from statistics import fmean, stdev
from typing import Any, NamedTuple

import pytest
import yaml

from tests.doors import ROOT, cells
from tests.paired import gaps_of, holm, interval, p_of

STUDIES = sorted(path.stem for path in (ROOT / "results").glob("*.jsonl"))


class Outcome(NamedTuple):
    """A column of published lines: its key in a log, and how it is printed."""

    key: str
    form: str


OUTCOMES = {
    "top1_last": Outcome("top1", ".2f"),
    "top5_last": Outcome("top5", ".2f"),
    "loss_last": Outcome("eval_loss", ".3f"),
}


class Row(NamedTuple):
    """A row of a study, the row it is compared with, and its role."""

    name: str
    against: str | None = None
    role: str | None = None


@cache
def content_of(study: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / f"results/{study}.yaml").read_text())


def rows_of(study: str) -> list[Row]:
    rows = []
    for name, settings in content_of(study)["rows"].items():
        if isinstance(settings, dict):
            rows.append(Row(name, settings.get("against"), settings.get("role")))
        else:
            rows.append(Row(name))
    return rows


@cache
def lines_of(study: str) -> list[dict[str, Any]]:
    text = (ROOT / f"results/{study}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def values_of(study: str, outcome: str) -> dict[str, dict[int, float]]:
    """Row -> seed -> value."""
    values: dict[str, dict[int, float]] = {}
    for line in lines_of(study):
        match = re.fullmatch(rf"{study}-(.+)-s\d+-\w+", line["name"])
        assert match, line["name"]
        last = line["log"][-1]
        values.setdefault(match[1], {})[line["seed"]] = last[OUTCOMES[outcome].key]
    return values


@cache
def printed(study: str) -> dict[str, set[str]]:
    """The cells of a study's tables by the text of their row, whatever their columns."""
    page = (ROOT / "docs/results.md").read_text()
    (section,) = [text for text in page.split("\n## ") if f"`results/{study}.yaml`" in text]
    found: dict[str, set[str]] = {}
    for first, *others in cells(section):
        found.setdefault(first, set()).update(others)
    return found


def either(value: float, form: str) -> set[str]:
    """A value as text; 92.545 is rounded to either side."""
    return {f"{value - 1e-9:{form}}", f"{value + 1e-9:{form}}"}


@pytest.mark.parametrize("study", STUDIES)
def test_the_page_has_all_rows_and_their_roles(study: str):
    rows = rows_of(study)
    names = {row.name for row in rows}
    assert names == set(values_of(study, "top1_last"))
    assert names <= set(printed(study))
    for row in rows:
        if row.role is not None:
            assert row.role in printed(study)[row.name]


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("study", STUDIES)
def test_the_page_has_means_and_differences(study: str, outcome: str):
    form = OUTCOMES[outcome].form
    values = values_of(study, outcome)
    for row in rows_of(study):
        found = printed(study)[row.name]
        ours = values[row.name]
        spread = f"{stdev(ours.values()):{form}}"
        means = either(fmean(ours.values()), form)
        assert {f"{mean} +/- {spread}" for mean in means} & found
        if row.against is None:
            continue
        gaps = gaps_of(ours, values[row.against])
        low, high = interval(gaps)
        assert f"{fmean(gaps):+{form}}" in found
        assert f"{low:+{form}} to {high:+{form}}" in found
        assert str(len(ours)) in found
        assert str(len(gaps)) in found
        if outcome == "loss_last":
            below = sum(gap < 0 for gap in gaps)
            assert f"{below} of {len(gaps)}" in found


@pytest.mark.parametrize("study", STUDIES)
def test_the_page_has_the_p_of_the_outcome_that_is_tested(study: str):
    values = values_of(study, content_of(study).get("tested", "top1_last"))
    adjusted = {}
    for row in rows_of(study):
        if row.against is None or row.role == "untested":
            continue
        p = p_of(gaps_of(values[row.name], values[row.against]))
        assert f"{p:.3f}" in printed(study)[row.name]
        if row.role != "primary":
            adjusted[row.name] = p
    for name, p in holm(adjusted).items():
        assert f"{p:.3f}" in printed(study)[name]
