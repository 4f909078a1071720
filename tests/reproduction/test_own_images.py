"""Images from a function: what it may return, what is refused, and that other data are noticed."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from tests.images import OWN, digits, disturbed, reads, recorded, write_images
from tests.pages import codes, section
from tests.programs import (
    ROOT,
    SHORT,
    SMALL,
    Overrides,
    Run,
    assert_refused,
    assert_succeeded,
    evaluate,
    overrides_of,
    predictions,
    runs,
    snapshot,
    train,
    trained,
)

HERE = "tests.reproduction.test_own_images"
PIXELS = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
NAMES = ["cat", "dog", "ant"]
TINY = overrides_of("""
    model.image_size=16 model.embed_dim=16 recipe.epochs=1 recipe.batch_size=6 dataset.workers=0
    device=cpu
""")


class Pairs(list[tuple[Any, Any]]):
    """Pairs whose classes are not read from them, as those of torchvision."""

    @property
    def targets(self) -> list[int]:
        return [i % 3 for i in range(len(self))]


class Named(list[tuple[Any, Any]]):
    """Pairs whose classes are indices of names, as those of torchvision."""

    def __init__(self, targets: list[Any], classes: list[str]):
        super().__init__((PIXELS[i % 12], "none") for i in range(len(targets)))
        self.targets = targets
        self.classes = classes


def pairs(convert: Any = np.array, labels: Any = NAMES, count: int = 12) -> list[tuple[Any, Any]]:
    return [(convert(PIXELS[i]), labels[i % 3]) for i in range(count)]


class Given(NamedTuple):
    """What a function returns, and the classes of its images 0, 1 and 2."""

    pairs: Any
    labels: list[str]


def grey(pixels: np.ndarray) -> np.ndarray:
    return pixels[:, :, 0]


GIVEN = {
    "arrays": Given(pairs(grey), NAMES),
    "images": Given(pairs(Image.fromarray, labels=[10, 9, -1]), ["10", "9", "-1"]),
    "arrays of one": Given(pairs(labels=np.arange(3)[:, None]), ["0", "1", "2"]),
    "targets": Given(Pairs((x, "none") for x in PIXELS), ["0", "1", "2"]),
    "names": Given(Named([0, 1, 2] * 4, ["x", "y", "z"]), ["x", "y", "z"]),
}


def as_both(half: Any) -> Any:
    return lambda: (half, half)


REFUSED: dict[str, Any] = {  # what the line tells -> what a function returns
    "data type: (1, 1, 3), <f8": as_both(pairs(lambda pixels: pixels / 255)),
    "more than 8 bits": as_both(pairs(lambda pixels: grey(pixels).astype(np.uint16))),
    "data type: (1, 1, 8), |u1": as_both(pairs(lambda pixels: pixels.transpose(2, 0, 1))),
    "image 0: no readable image: str": as_both(pairs(lambda pixels: "path")),
    "two classes are named 'x'": as_both(Named([0, 1, 2] * 2, ["x", "y", "x"])),
    "image 3 is of class -1": as_both(Named([0, 1, 1, -1, -1], ["x", "y"])),
    "image 2 is of class 2": as_both(Named([0, 1, 2], ["x", "y"])),
    "image 0 is of class 'x'": as_both(Named(["x", "y"], ["x", "y"])),
    "'int' object is not iterable": lambda: 3,
    "IndexError": lambda: (pairs(), [(PIXELS[0], "cat"), (PIXELS[1],)]),
    "held-out images are of class 'ant'": lambda: (pairs(count=2), pairs(count=3)),
    "instances of 'str' and 'int'": lambda: ([(PIXELS[0], 0), (PIXELS[0], "0")] * 3, pairs()),
    f"KeyError: 'key' ({__file__}:": lambda: {}["key"],
}


def load(name: str) -> Any:
    if name in REFUSED:
        return REFUSED[name]()
    half = GIVEN[name].pairs
    return half, half


def own(name: str) -> Overrides:
    source = f"dataset.source={HERE}:load"
    return ("dataset=custom", source, f"+dataset.options.name={name!r}", TINY)


@pytest.mark.parametrize("name", GIVEN)
def test_any_sequence_of_pairs_is_trained_on_and_evaluated(here: Path, name: str):
    labels = GIVEN[name].labels
    run = trained(own(name))
    result = evaluate("run=outputs/mine", f"dataset.source={HERE}:load", "predictions=x.csv")
    assert_succeeded(result, "on 12 images of custom")
    rows = predictions("x.csv")
    assert len(rows) == 12
    for place, row in enumerate(rows):
        assert row["image"] == str(place)
        assert row["class"] == labels[place % 3]
    images = run.summary["data"]["images"]
    assert images.startswith("12 + 12 images of 3 classes")
    assert run.summary["top5_last"] == 100  # there are only three classes
    assert run.summary["top1_last"] < 100


@pytest.mark.parametrize("told", REFUSED)
def test_what_a_function_gets_wrong_ends_in_one_line(here: Path, told: str):
    """One of its errors is told with its place."""
    result = train(own(told))
    assert_refused(result, "dataset.source", told)
    assert not snapshot()


def test_a_bug_of_the_function_keeps_its_traceback_in_a_worker(here: Path):
    with disturbed("fail", at=29):
        result = train(OWN, SMALL, "dataset.workers=1", "dataset.eval_limit=null")
    assert result.status == 1
    assert "what\never" in result.err
    assert "Traceback" in result.err
    assert "tests/images.py" in result.err


def classes_read(half: str, data: Any) -> list[int]:
    """How many images of each class of a half a run has read."""
    indices = {read.index for read in reads(Path("log")) if read.half == half}
    return np.bincount([data.targets[index] for index in indices]).tolist()


def test_limits_keep_classes_balanced(here: Path):
    with recorded(here / "log"):
        overrides = ("dataset.limit=20", "dataset.eval_limit=10", "recipe.epochs=1")
        result = train(OWN, SHORT, overrides)
    assert_succeeded(result, "on 20 images of custom, 10 classes, 10 held out")
    train_half, held_out = digits()
    assert classes_read("train", train_half) == [2] * 10
    assert classes_read("held_out", held_out) == [1] * 10


# Other data than those of a run

FOLDER = ("dataset=image_folder", "dataset.root=d", TINY)


def renamed(image: Path) -> None:
    image.rename(image.with_name("9.png"))


def made_grey(image: Path) -> None:
    Image.open(image).convert("L").save(image)


@pytest.mark.parametrize("change", [renamed, made_grey])
def test_finished_run_is_not_the_result_of_other_images(here: Path, change: Callable[[Path], None]):
    write_images(here / "d", ["ant", "bee", "cat"], train=4, held_out=1, size=16)
    assert_succeeded(train(FOLDER))
    (run,) = runs()
    again = train(FOLDER, "resume=auto")
    assert_succeeded(again, "top-1")
    assert not again.err
    change(here / "d/train/ant/0.png")
    before = snapshot()
    assert_refused(train(FOLDER, "resume=auto"), run.path.name, "data")
    assert_refused(train("-m", "seed=1,0", FOLDER, "resume=auto"), run.path.name, "data")
    assert snapshot() == before
    trained(FOLDER, "resume=auto", name="other")


# The examples of the page on random images

PAGE = (ROOT / "docs" / "using.md").read_text()
(HUB,) = codes(section(PAGE, "### Images from a function"))


class Rows:
    """Behaves like a split of Hugging Face's `datasets`: rows by index, columns by name."""

    def __init__(self, count: int):
        self.count = count
        self.features = {"labels": SimpleNamespace(names=NAMES)}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: Any) -> Any:
        if key == "labels":
            return [i % 3 for i in range(self.count)]
        return {"image": Image.fromarray(PIXELS[key]), "labels": key % 3}


def test_the_example_of_hugging_face_trains_and_evaluates(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(here)
    splits = {"train": Rows(12), "test": Rows(6)}
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda name: splits))
    Path("hub.py").write_text(HUB)
    options = overrides_of("+dataset.options.name=beans +dataset.options.label=labels")
    source = "dataset.source=hub:load"
    line = ("name=hub", "dataset=custom", source, TINY, options, "model.image_size=8")
    assert_succeeded(train(line, "dataset.workers=1"), "on 12 images of custom")
    run = Run("outputs/hub")
    assert_succeeded(evaluate(f"run={run.path}", source))
    assert run.evaluation()["top1"] == run.summary["top1_last"]
    assert_succeeded(train(line, "resume=auto"), "top-1")  # refused if it were another run
    assert run.summary["data"]["images"].startswith("12 + 6 images")
