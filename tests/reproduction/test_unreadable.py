"""Images that cannot be read: another is trained on in their place, evaluation ends."""

from pathlib import Path

import pytest

from tests.images import OWN, SOURCE, unreadable, write_images
from tests.programs import (
    SHORT,
    assert_refused,
    assert_succeeded,
    evaluate,
    overrides_of,
    train,
    trained,
)

IMAGES = (OWN, "+dataset.options.train=100", SHORT)
FOLDER = (
    overrides_of("""
        dataset=image_folder dataset.root=images model.image_size=16 augmentation=[]
        dataset.workers=0
    """),
    SHORT,
)


def test_the_next_image_takes_the_place_of_an_unreadable_one(here: Path):
    with unreadable(7):
        result = train(IMAGES, "name=mine", "dataset.workers=0")
    assert_succeeded(result)
    (line,) = {x for x in result.lines if x.startswith("warning: ")}
    assert line.startswith("warning: image 7: image file is truncated")
    assert line.endswith("; the next image takes its place")


def test_a_run_ends_if_no_image_is_readable(here: Path):
    with unreadable(*range(1, 100)):
        result = train(IMAGES, "name=mine", "dataset.workers=1")
    assert result.status == 1
    assert "image file is truncated" in result.err.splitlines()[-1]
    with unreadable(0):
        result = train(IMAGES, "name=other", "dataset.workers=1")
    assert_refused(result, SOURCE, "image 0: image file is truncated")


@pytest.mark.parametrize("half", ["train", "val"])
def test_a_file_that_is_no_image_is_named(here: Path, half: str):
    root = write_images(here / "images", ["ant", "bee"], train=60, held_out=2, size=16)
    (root / half / "ant" / "1.png").write_bytes(b"none")
    result = train(FOLDER, "name=mine")
    if half == "val":
        assert_refused(result, "val/ant/1.png: no readable image", status=1)
    else:
        assert_succeeded(result)
        assert "train/ant/1.png: no readable image" in result.err


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_ends_an_evaluation(here: Path, workers: int):
    trained(IMAGES)
    with unreadable(4, half="held_out"):
        evaluation = evaluate("run=outputs/mine", SOURCE, f"dataset.workers={workers}")
    assert_refused(evaluation, "image 4: image file is truncated", status=1)
