"""The tables of a few stored runs have the recorded values.

tests/fixtures/runs holds these runs without config.yaml, which is composed here: runs are matched
by their configuration, and its values may change. recorded_tables.csv beside it holds the values of
every row with a run; its differences show what changed.
"""

import csv
import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from reproduction.config import Config
from reproduction.studies.latency import read_latency
from reproduction.studies.plan import Point
from reproduction.studies.results import study_rows
from reproduction.studies.runs import read_runs
from reproduction.studies.study import papers_studies
from tests.reproduction.tables import points_at

EPOCHS = 310  # of every stored run
FIXTURES = Path(__file__).parents[1] / "fixtures"
RUNS = {  # folder without "-SEED" -> row; later runs are newer
    "htm-0-again": "table1/cifar100_htm",
    "htm": "table1/cifar100_htm",
    "baseline": "table1/cifar100_baseline",
    "vtm": "table1/cifar100_vtm",
    "cifar10-vtm": "table1/cifar10_vtm",
    "gradient": "table3/gradient",
    "without-scorenet": "table4/without_scorenet",
    "without-tokens": "table4/without_tokens",
    "none": "table5/none",
    "none-htm": "table5/htm",
    "tau-0": "sweep-tau/tau=0",
    "tau-1": "sweep-tau/tau=1",
    "kappa-3": "sweep-kappa/kappa=3",
    "short": "table1/cifar10_htm",  # has other epochs and belongs to no row
    "broken": "table1/cifar100_htm",  # lacks an accuracy
}
Values = dict[tuple[str, str, str, str], str]


def for_epochs(config: Config, epochs: int) -> Config:
    return dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, epochs=epochs))


@pytest.fixture(scope="module")
def points() -> list[Point]:
    return [
        dataclasses.replace(point, config=for_epochs(point.config, EPOCHS)) for point in points_at()
    ]


@pytest.fixture(scope="module")
def outputs(points: list[Point], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stored runs with their configurations."""
    outputs = tmp_path_factory.mktemp("recorded") / "outputs"
    shutil.copytree(FIXTURES / "runs", outputs)
    configs, order = {point.label: point.config for point in points}, list(RUNS)
    for summary in outputs.glob("*/summary.json"):
        name, _, seed = summary.parent.name.rpartition("-")
        name, seed = (name, seed) if name in RUNS else (summary.parent.name, "0")
        config = dataclasses.replace(configs[RUNS[name]], seed=int(seed))
        config = for_epochs(config, EPOCHS - 10) if name == "short" else config
        text = yaml.safe_dump(dataclasses.asdict(config))
        summary.with_name("config.yaml").write_text(text)
        os.utime(summary, (order.index(name), order.index(name)))
    return outputs


def recorded() -> Values:
    with (FIXTURES / "recorded_tables.csv").open() as file:
        rows = csv.DictReader(file)
        return {(x["study"], x["column"], x["row"], x["name"]): x["value"] for x in rows}


def text(value: Any) -> str:
    return ";".join(map(str, value)) if isinstance(value, list) else str(value)


def test_tables_of_stored_runs_have_the_recorded_values(outputs: Path, points: list[Point]):
    runs, keys = read_runs(outputs), {point.label: point.key for point in points}
    found: dict[tuple[str, str, str, str], Any] = {}
    for name, study in papers_studies().items():
        own = [point for point in points if point.study == name]
        table = study_rows(study, own, keys, runs, None, read_latency(outputs))
        for row in table[table.n > 0].to_dict("records"):
            place = (name, row["column"], row["row"])
            found |= {(*place, key): value for key, value in row.items()}
    expected = recorded()
    assert len(expected) > 200
    for key, value in expected.items():
        ours = found[key]
        if isinstance(ours, float):
            assert ours == pytest.approx(float(value), rel=1e-9, abs=1e-9), key
        else:
            assert text(ours) == value, key
