"""The validation split: which images it has, what a run evaluates when, and what it then says."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.images import OWN, SOURCE, digits, reads, recorded, write_images
from tests.programs import (
    SHORT,
    Run,
    assert_refused,
    assert_succeeded,
    evaluate,
    overrides_of,
    train,
    trained,
)

TEST_KEYS = {"top1_last", "top5_last", "top1_selected", "top5_selected"}
VALIDATION_KEYS = {"val_top1_last", "val_top1_selected", "selected_epoch"}
# 60 digits to train on, of which 15 are for validation, and 30 held out
SPLIT = (OWN, "dataset.validation=0.25", SHORT, "recipe.drop_last=false")
TARGETS = np.array(digits()[0].targets)
FOLDER = overrides_of("""
    dataset=image_folder dataset.root=images model.image_size=16 model.embed_dim=16
    recipe.batch_size=6 recipe.epochs=1 dataset.workers=0 device=cpu recipe.drop_last=false
""")


class Reads(NamedTuple):
    """The images of a run of one epoch, in the order in which they were read."""

    trained: list[int]
    validation: list[int]
    held_out: int


def reads_of(log: Path) -> Reads:
    """Before the run, it tries the first image; after it, pictures show some."""
    found = reads(log)
    _, *order = [read.index for read in found if read.half == "train"]
    held_out = sum(read.half == "held_out" for read in found)
    return Reads(order[:45], order[45:60], held_out)


def split(name: str, *overrides: str) -> Reads:
    """What a run of this name reads."""
    with recorded(Path(f"{name}.log")):
        result = train(SPLIT, "recipe.epochs=1", f"name={name}", overrides)
    assert_succeeded(result, "on 45 images of custom, 10 classes, 30 held out, 15 for validation")
    return reads_of(Path(f"{name}.log"))


def test_split_is_stratified_and_no_image_of_it_is_trained_on(here: Path):
    found = split("one")
    assert sorted(found.trained + found.validation) == list(range(60))
    assert found.held_out == 30
    assert found.validation == sorted(found.validation)
    assert found.trained != sorted(found.trained)
    whole = np.bincount(TARGETS, minlength=10)
    part = np.bincount(TARGETS[found.validation], minlength=10)
    assert (abs(part - whole / 4) < 1).all(), part  # 1 or 2 of each class


def test_split_depends_on_its_own_seed_alone(here: Path):
    first = split("first")
    again = split("again", "seed=1")
    other = split("other", "dataset.validation_seed=1")
    assert first.validation == again.validation
    assert first.validation != other.validation


@pytest.fixture(scope="module")
def selected(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Of four epochs one in the middle is selected; another has the least loss."""
    root = tmp_path_factory.mktemp("selected")
    with recorded(root / "log"):
        return trained(SPLIT, "recipe.epochs=4", "recipe.lr=0.02", "seed=1", root=root)


def test_the_first_of_the_best_epochs_is_selected(selected: Run):
    top1 = [line["val_top1"] for line in selected.epochs]
    losses = [line["val_loss"] for line in selected.epochs]
    best = top1.index(max(top1))
    assert top1.count(max(top1)) > 1, "choose another seed"
    assert 0 < best < losses.index(min(losses)), "choose another seed"
    assert selected.summary["selected_epoch"] == best + 1
    assert selected.summary["val_top1_selected"] == top1[best]
    assert selected.summary["val_top1_last"] == top1[-1]


def test_lines_and_summary_say_on_which_images_a_value_is(selected: Run):
    for line in selected.epochs:
        assert set(line) == {"epoch", "val_top1", "val_top5", "val_loss"}
    assert set(selected.summary) >= TEST_KEYS | VALIDATION_KEYS
    for name in ("top1_best", "top1_median10", "top5_best"):
        assert selected.summary[name] is None


def test_the_test_set_is_read_at_the_end_alone(selected: Run):
    halves = [read.half for read in reads(selected.path.parent / "log")]
    epochs = 1 + 4 * (45 + 15)
    assert set(halves[:epochs]) == {"train"}
    assert halves[epochs : epochs + 60] == ["held_out"] * 60
    assert halves.count("held_out") == 60


@pytest.mark.parametrize(("weights", "chosen"), [("last", "last"), ("best", "selected")])
def test_the_test_set_is_evaluated_for_the_last_and_the_selected_epoch(
    selected: Run, weights: str, chosen: str
):
    result = evaluate(f"run={selected.path}", f"weights={weights}", SOURCE)
    assert_succeeded(result, "on 30 images of custom")
    scores = selected.evaluation(weights)
    assert selected.summary[f"top1_{chosen}"] == scores["top1"]
    assert selected.summary[f"top5_{chosen}"] == scores["top5"]


def test_folder_with_val_and_test_is_validated_on_val_and_tested_at_the_end(here: Path):
    write_images(here / "images", ["cat", "dog"], train=6, held_out=2, test=4)
    assert_refused(train(FOLDER, "dataset.validation=0.2"), "dataset.validation=0.2")
    assert not (here / "outputs").exists()
    result = train("name=run", FOLDER)
    told = "on 12 images of image_folder, 2 classes, 8 held out, 4 for validation"
    assert_succeeded(result, told)
    assert not result.err
    summary = Run("outputs/run").summary
    assert set(summary) >= TEST_KEYS | VALIDATION_KEYS
    assert summary["top1_best"] is None
    assert_succeeded(evaluate("run=outputs/run"), "on 8 images of image_folder")
