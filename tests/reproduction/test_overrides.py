"""An override means what was typed, on every command line."""

from pathlib import Path

import pytest

from tests.programs import (
    SMALL,
    assert_succeeded,
    config_of,
    evaluate,
    runs,
    train,
)

ONE = (SMALL, "recipe.epochs=1")


def test_every_program_reads_alike(here: Path):
    assert_succeeded(train("-m", "seed=1,2", "name=mine${seed}", ONE))
    assert [run.path.name for run in runs()] == ["mine1", "mine2"]
    assert_succeeded(evaluate("run=outputs/mine1", "predictions=mine.csv", "device=cpu"))
    assert Path("mine.csv").exists()
    assert config_of("output_root='~/x'").output_root == str(Path("~/x").expanduser())


@pytest.mark.parametrize("value", ["'table1/cifar10_htm'", "[table1/cifar10_htm]"])
def test_a_name_has_what_an_override_means(here: Path, value: str):
    listed = train("dry_run=1", "experiment=table1/cifar10_htm")
    assert_succeeded(listed, "outputs/table1-cifar10_htm-s0-")
    assert train("dry_run=1", f"experiment={value}").out == listed.out
