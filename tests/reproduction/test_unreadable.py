"""Images that cannot be read: in training the next one takes their place, in evaluation none."""

from pathlib import Path

import pytest

from reproduction.data import halves
from reproduction.data.sources import opened
from tests.doors import (
    SHORT,
    Result,
    Run,
    assert_refused,
    assert_succeeded,
    config_of,
    evaluate,
    same,
    train,
    trained,
    words_of,
)
from tests.images import OWN, SOURCE, disturbed, unreadable, write_images

IMAGES = (OWN, "+dataset.options.train=100", SHORT)  # of which one may be unreadable
CROPPED = ("recipe.transforms.scale=[0.3,1]", "recipe.transforms.hflip=0.5")  # augmentation shows
FOLDER = (
    words_of("""
        dataset=image_folder dataset.root=images model.image_size=16 augmentation=[]
        dataset.workers=0
    """),
    SHORT,
)


def warnings_of(result: Result) -> list[str]:
    assert_succeeded(result)
    return [line for line in result.lines if line.startswith("warning: ")]


@pytest.mark.parametrize(
    ("index", "more"),
    [
        (0, ("dataset.workers=2",)),  # the one that is tried before the run
        (99, ("dataset.workers=0",)),  # whose next one is the first
        pytest.param(59, ("devices=2",), marks=pytest.mark.slow),
    ],
)
def test_the_next_image_takes_the_place_of_one_that_is_unreadable(
    here: Path, index: int, more: tuple[str, ...]
):
    """With its own class, augmented as the one that is missing."""
    words = (IMAGES, CROPPED, more)
    trained(words, f"+dataset.options.replaced={index}", name="replaced")
    with unreadable(index):
        (line,) = warnings_of(train(words, "name=unreadable"))
    assert f"image {index}: " in line
    assert "truncated" in line
    run = Run("outputs/unreadable")
    expected = Run("outputs/replaced")
    assert same(run, expected) == [f"state.unreadable.{index}"]
    assert run.summary["unreadable_images"] == 1
    assert "unreadable_images" not in expected.summary


def test_a_resumed_run_knows_what_was_unreadable(here: Path):
    with unreadable(7):
        trained(IMAGES, name="whole")
        with disturbed("SIGTERM", at=150):
            assert train(IMAGES, "name=mine").status == 130
        assert Run("outputs/mine").checkpoint()["unreadable"].keys() == {7}
        assert not warnings_of(train(IMAGES, "name=mine", "resume=auto"))
    assert same(Run("outputs/mine"), Run("outputs/whole")) == []
    assert Run("outputs/mine").summary["unreadable_images"] == 1


@pytest.mark.parametrize("indices", [(3, 4), (3, 70)], ids=["in a row", "apart"])
def test_more_than_one_in_a_hundred_ends_the_run(here: Path, indices: tuple[int, int]):
    with unreadable(*indices):
        result = train(IMAGES, "name=mine", "dataset.workers=1")
    assert result.status == 1
    assert "2 of 100 images to train on" in result.lines[-1]
    assert "Traceback" not in result.err
    assert Run("outputs/mine").summary["status"] == "failed"


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_ends_an_evaluation_that_says_so(here: Path, workers: int):
    trained(IMAGES)
    with unreadable(4, half="held_out"):
        run = train(IMAGES, "name=other", f"dataset.workers={workers}")
        evaluation = evaluate("run=outputs/mine", SOURCE, f"dataset.workers={workers}")
    assert_refused(run, "image 4: no readable image", "in evaluation", status=1)
    assert_refused(evaluation, "image 4: no readable image", "in evaluation", status=1)


@pytest.mark.parametrize("memory", [0, 2**30])
def test_files_and_images_in_memory_go_the_same_way(
    here: Path, monkeypatch: pytest.MonkeyPatch, memory: int
):
    root = write_images(here / "images", ["ant", "bee"], train=60, held_out=2, size=16)
    broken = root / "train" / "ant" / "9.png"  # the last of its class, by name
    broken.write_bytes(b"none")
    monkeypatch.setattr(halves, "MOST_MEMORY", memory)
    (line,) = warnings_of(train(FOLDER, "name=mine"))
    assert str(broken.relative_to(here)) in line
    assert Run("outputs/mine").checkpoint()["unreadable"].keys() == {59}
    (root / "val" / "bee" / "1.png").write_bytes(b"none")
    assert_refused(evaluate("run=outputs/mine"), "val/bee/1.png", status=1)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_system_is_no_unreadable_image(
    here: Path, monkeypatch: pytest.MonkeyPatch, workers: int
):
    """A read of this file fails with EIO, as that of a damaged disk."""
    root = write_images(here / "images", ["ant", "bee"], train=60, held_out=2, size=16)
    lost = root / "train" / "bee" / "7.png"
    lost.unlink()
    lost.symlink_to("/proc/self/mem")
    monkeypatch.setattr(halves, "MOST_MEMORY", 0)
    result = train(FOLDER, "name=mine", f"dataset.workers={workers}")
    assert_refused(result, "images/train/bee/7.png: Input/output error", status=1)


def test_a_machine_holds_decoded_images_once_over_its_ranks(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    """All that fit: first those to train on, then the held-out ones."""
    root = write_images(here / "images", ["ant", "bee"], train=4, held_out=2, size=16)
    data = opened(config_of("dataset=image_folder", f"dataset.root={root}").dataset)
    fitting = {  # images that fit, ranks -> the halves that are held, of 8 and of 4 images
        (12, 1): {"train", "held_out"},
        (11, 1): {"train"},
        (12, 2): {"held_out"},
        (12, 4): set(),
    }
    for (images, ranks), expected in fitting.items():
        monkeypatch.setattr(halves, "MOST_MEMORY", images * 3 * 16 * 24)
        data_in_memory = halves.in_memory(data, ("train", "held_out"), ranks)
        held = set()
        if data_in_memory.train.decoded is not None:
            held.add("train")
        if data_in_memory.held_out.decoded is not None:
            held.add("held_out")
        assert held == expected
