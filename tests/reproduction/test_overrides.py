"""An override means what was typed, on every command line."""

from pathlib import Path

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
