"""Images that cannot be read: in training the next one takes their place, in evaluation none."""

from pathlib import Path

import pytest

from reproduction.data import halves
from reproduction.data.sources import opened
from tests.doors import SMALL, Result, Run, config_of, evaluate, same, train
from tests.images import OWN, disturbed, unreadable, write_images

NO_LIMITS = tuple(x for x in SMALL if "limit" not in x)
IMAGES = (*OWN, "+dataset.options.train=120", *NO_LIMITS)  # of which one may be unreadable
CROPPED = ("recipe.transforms.scale=[0.3,1]", "recipe.transforms.hflip=0.5")  # augmentation shows
FOLDER = (
    *("dataset=image_folder", "dataset.root=images", "model.image_size=16", "augmentation=[]"),
    *("dataset.workers=0", *NO_LIMITS),
)


def warnings_of(result: Result) -> list[str]:
    assert result.status == 0, result.err
    return [line for line in result.lines if line.startswith("warning: ")]


@pytest.mark.parametrize(
    ("index", "more"),
    [
        (0, ("dataset.workers=2",)),  # the one that is tried before the run
        (119, ("dataset.workers=0",)),  # whose next one is the first
        pytest.param(59, ("devices=2",), marks=pytest.mark.slow),
    ],
)
def test_the_next_image_takes_the_place_of_one_that_is_unreadable(
    here: Path, index: int, more: tuple[str, ...]
):
    """With its own class, augmented as the one that is missing."""
    words = (*IMAGES, *CROPPED, *more)
    assert train(*words, f"+dataset.options.replaced={index}", "name=replaced").status == 0
    with unreadable(index):
        (line,) = warnings_of(train(*words, "name=unreadable"))
    assert f"image {index}: " in line
    assert "truncated" in line
    run = Run("outputs/unreadable")
    expected = Run("outputs/replaced")
    assert same(run, expected) == [f"state.unreadable.{index}"]
    assert run.summary["unreadable_images"] == 1
    assert "unreadable_images" not in expected.summary


def test_a_resumed_run_knows_what_was_unreadable(here: Path):
    with unreadable(7):
        assert train(*IMAGES, "name=whole").status == 0
        with disturbed("SIGTERM", at=200):
            assert train(*IMAGES, "name=mine").status == 130
        assert Run("outputs/mine").checkpoint()["unreadable"].keys() == {7}
        assert not warnings_of(train(*IMAGES, "name=mine", "resume=auto"))
    assert same(Run("outputs/mine"), Run("outputs/whole")) == []
    assert Run("outputs/mine").summary["unreadable_images"] == 1


@pytest.mark.parametrize("indices", [(3, 4), (3, 70)], ids=["in a row", "apart"])
def test_more_than_one_in_a_hundred_ends_the_run(here: Path, indices: tuple[int, int]):
    with unreadable(*indices):
        result = train(*IMAGES, "name=mine", "dataset.workers=1")
    assert result.status == 1
    assert "2 of 120 images to train on" in result.lines[-1]
    assert "Traceback" not in result.err
    assert Run("outputs/mine").summary["status"] == "failed"


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_ends_an_evaluation_that_says_so(here: Path, workers: int):
    assert train(*IMAGES, "name=mine").status == 0
    with unreadable(4, half="held_out"):
        run = train(*IMAGES, "name=other", f"dataset.workers={workers}")
        words = ["run=outputs/mine", "dataset.source=tests.images:digits"]
        evaluation = evaluate(*words, f"dataset.workers={workers}")
    for result in (run, evaluation):
        assert (result.status, len(result.lines)) == (1, 1), result.err
        assert "image 4: no readable image" in result.err
        assert "in evaluation" in result.err


@pytest.mark.parametrize("memory", [0, 2**30])
def test_files_and_images_in_memory_go_the_same_way(
    here: Path, monkeypatch: pytest.MonkeyPatch, memory: int
):
    root = write_images(here / "images", ["ant", "bee"], train=60, held_out=2, size=16)
    broken = root / "train" / "ant" / "9.png"  # the last of its class, by name
    broken.write_bytes(b"none")
    monkeypatch.setattr(halves, "MOST_MEMORY", memory)
    (line,) = warnings_of(train(*FOLDER, "name=mine"))
    assert str(broken.relative_to(here)) in line
    assert Run("outputs/mine").checkpoint()["unreadable"].keys() == {59}
    (root / "val" / "bee" / "1.png").write_bytes(b"none")
    result = evaluate("run=outputs/mine")
    assert (result.status, len(result.lines)) == (1, 1)
    assert "val/bee/1.png" in result.err


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
    result = train(*FOLDER, "name=mine", f"dataset.workers={workers}")
    assert (result.status, len(result.lines)) == (1, 1), result.err
    assert "images/train/bee/7.png: Input/output error" in result.err


def test_a_machine_holds_decoded_images_once_over_its_ranks(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    """All that fit: first those to train on, then the held-out ones."""
    root = write_images(here / "images", ["ant", "bee"], train=4, held_out=2, size=16)
    data = opened(config_of("dataset=image_folder", f"dataset.root={root}").dataset)
    cases = {  # images that fit, ranks -> which halves are held, of 8 and of 4 images
        (12, 1): (True, True),
        (11, 1): (True, False),
        (12, 2): (False, True),
        (12, 4): (False, False),
    }
    for (images, ranks), is_held in cases.items():
        monkeypatch.setattr(halves, "MOST_MEMORY", images * 3 * 16 * 24)
        held = halves.in_memory(data, ("train", "held_out"), ranks)
        assert (held.train.decoded is not None, held.held_out.decoded is not None) == is_held
