"""What a command knew at its beginning it knows at its end: keys, rows, files, overrides."""

import shlex
import shutil
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
import yaml

from tests.conftest import slow
from tests.programs import (
    ROOT,
    SMALL,
    Run,
    assert_refused,
    assert_succeeded,
    cells,
    config_of,
    script,
    train,
)
from tests.reproduction.finished import write

pytestmark = pytest.mark.usefixtures("here")
ONE = (SMALL, "recipe.epochs=1", "recipe.max_steps=1")
TAU = "augmentation.htm.tau"
RHO = "augmentation.htm.rho"


def composed(model: Run, name: str, *overrides: str, top1: float = 50.0) -> None:
    """Writes four runs of these overrides."""
    for seed in range(4):
        folder = write(model, f"{name}-{seed}", {}, seed, top1_last=top1 + seed**2)
        config = asdict(config_of(SMALL, overrides)) | {"seed": seed}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))


def table(*overrides: str) -> tuple[pd.DataFrame, str]:
    """The numbers of the runs in outputs/, and the table as text."""
    result = script("runs", "outputs", "--csv", "numbers.csv", overrides)
    assert_succeeded(result)
    return pd.read_csv("numbers.csv"), result.out


# --- rows keep their settings, as values --------------------------------------------------------


def test_what_comes_with_a_name_is_shown_if_it_could_be_another(model: Run):
    """tau applies to both rows, so they differ in it as well, and are no pair."""
    composed(model, "htm", "augmentation=[htm]", f"{TAU}=0.2")
    composed(model, "both", "augmentation=[mixup,htm]", f"{TAU}=2", top1=70.0)
    numbers, text = table("--against", "mixing=htm")
    titles, *rows = cells(text)
    assert "tau" in titles
    assert {row[titles.index("tau")] for row in rows} == {"0.2", "2"}
    assert numbers.difference.isna().all()


def test_a_method_is_compared_with_its_absence(model: Run):
    """Its settings do not apply to the other row: they are no difference of their own."""
    composed(model, "none", "augmentation=[]")
    composed(model, "htm", "augmentation=[htm]", f"{TAU}=0.2", top1=70.0)
    for against in ("mixing=none", "mixing=htm"):
        numbers, _ = table("--against", against)
        assert numbers.difference.notna().sum() == 1


GRID = [
    {TAU: tau, RHO: rho, "dataset.limit": limit, "recipe.epochs": epochs}
    for tau, rho, limit, epochs in product((1.0, 2.0), (0.0, "auto"), (None, 60), (1, 2))
]


def test_rows_that_are_compared_differ_in_the_named_key_alone(model: Run):
    """The accuracies are powers of two, so that a difference tells its pair of rows."""
    rows = [row for place, row in enumerate(GRID) if place not in (0, 3, 13)]
    expected = set()
    for i, row in enumerate(rows):
        write(model, str(i), row, top1_last=float(2**i))
        for j, base in enumerate(rows):
            if [key for key in row if row[key] != base[key]] == [TAU] and base[TAU] == 1:
                expected.add((2**i, 2**j))
    assert 0 < len(expected) < [row[TAU] for row in rows].count(2.0)  # some are not compared
    numbers, text = table("--against", "tau=1")
    assert len(numbers) == len(rows)
    compared = numbers[numbers.difference.notna()]
    bases = compared["mean"] - compared.difference
    assert set(zip(compared["mean"], bases, strict=True)) == expected
    titles, *lines = cells(text)
    assert len({tuple(line[: titles.index("n")]) for line in lines}) == len(rows)


# --- an override of all rows ---------------------------------------------------------------------

ROWS = f"""
title: Mine
overrides: [{", ".join(ONE[0])}, recipe.epochs=1, recipe.max_steps=1]
rows:
  low: [recipe.lr=0.001]
  high: {{overrides: [recipe.lr=0.002], against: low}}
seeds: 1
"""


@pytest.mark.parametrize(
    ("study", "override", "row"),
    [
        ("table4", "augmentation.htm.detector=random", "without_tokens"),
        ("sweep-tau", "augmentation.htm.tau=inf", "sweep"),
        ("table4", "augmentation.htm={detector:random}", "without_"),
        ("table5", "augmentation=[]", "none"),
        ("mine.yaml", "++recipe.lr=0.1", "low"),
    ],
)
def test_a_key_that_a_row_is_about_cannot_be_set_for_all(study: str, override: str, row: str):
    Path("mine.yaml").write_text(ROWS)
    assert_refused(script("reproduce", study, override, "dry_run=1"), override, row)
    assert_refused(script("reproduce", study, override, "--no-train"), override, row)


# --- overrides -----------------------------------------------------------------------------------


def test_a_later_value_replaces_a_list_of_values():
    assert_succeeded(train("-m", "seed=1,2", "seed=3", "dry_run=1"), "1 run:", "-s3-")
    assert_succeeded(train("-m", "seed=3", "seed=1,2", "dry_run=1"), "2 runs:", "-s1-", "-s2-")


@pytest.fixture
def conf(here: Path) -> Path:
    """A configuration of one's own, which is the project's with another seed."""
    folder = here / "conf of mine"
    shutil.copytree(ROOT / "conf", folder)
    path = folder / "train.yaml"
    path.write_text(path.read_text().replace("\nseed: 0", "\nseed: 5"))
    return folder


PROCESSES = slow(["-m", "jobs=2"], id="processes")


@pytest.mark.parametrize("jobs", [[], ["-m"], PROCESSES])
def test_the_files_of_a_command_reach_its_jobs_and_its_record(conf: Path, jobs: list[str]):
    assert_succeeded(train("--config-path", str(conf), jobs, "name=mine", ONE))
    run = Run("outputs/mine")
    assert run.config["seed"] == 5
    again = shlex.split(run.summary["command"])
    assert again[:2] == ["python", "train.py"]
    shutil.move("outputs/mine", "first")
    assert_succeeded(train(again[2:]))
    assert Run("outputs/mine").config == run.config | Run("first").config
