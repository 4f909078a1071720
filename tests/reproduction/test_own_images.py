"""Images from a function: what it may return, what is refused, and that other data are noticed."""

import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from reproduction.data import halves
from tests.doors import ROOT, SMALL, Run, dry, evaluate, snapshot, train
from tests.images import OWN, digits, disturbed, recorded, write_images

HERE = "tests.reproduction.test_own_images"
PIXELS = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
NAMES = ["cat", "dog", "ant"]
NUMBER = "TESTS_OWN_NUMBER"  # tells a function what to do
TINY = (
    *("model.image_size=16", "model.embed_dim=16", "recipe.epochs=1", "recipe.batch_size=6"),
    *("dataset.workers=0", "device=cpu"),
)


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


SERVED: dict[str, tuple[Any, list[str]]] = {  # what a function returns -> its classes
    "arrays": (pairs(), ["ant", "cat", "dog"]),
    "grey arrays": (pairs(lambda x: x[:, :, 0]), ["ant", "cat", "dog"]),
    "images": (pairs(Image.fromarray), ["ant", "cat", "dog"]),
    "integers": (pairs(labels=[10, 9, 8]), ["8", "9", "10"]),
    "arrays of one": (pairs(labels=np.arange(3)[:, None]), ["0", "1", "2"]),
    "targets": (Pairs((x, "none") for x in PIXELS), ["0", "1", "2"]),
    "names": (Named([0, 1, 2] * 4, ["x", "y", "z"]), ["x", "y", "z"]),
    "minus one": (pairs(labels=[-1, 0, 1]), ["-1", "0", "1"]),
}
REFUSED: dict[str, Any] = {
    "one half": lambda: 3,
    "fewer classes than images": lambda: (pairs(), [(PIXELS[0], "cat"), (PIXELS[1],)]),
    "one class": lambda: ([(PIXELS[0], 1)] * 6, [(PIXELS[0], 1)]),
    "a class that is not trained on": lambda: (pairs(count=2), pairs(count=3)),
    "numbers beside names": lambda: ([(PIXELS[0], 0), (PIXELS[0], "0")] * 3, pairs()),
    "an error": lambda: {}["key"],
    "floating-point images": lambda: (pairs(lambda x: x / 255),) * 2,
    "deep images": lambda: (pairs(lambda x: x[:, :, 0].astype(np.uint16)),) * 2,
    "channels first": lambda: (pairs(lambda x: x.transpose(2, 0, 1)),) * 2,
    "no images": lambda: (pairs(lambda x: "path"),) * 2,
    "two classes of one name": lambda: (Named([0, 1, 2] * 2, ["x", "y", "x"]),) * 2,
}
LABELS: dict[str, tuple[Any, str]] = {  # what a function returns -> the first bad place
    "hidden labels": (Named([0, 1, 1, -1, -1], ["x", "y"]), "image 3 is of class -1"),
    "too large ones": (Named([0, 1, 2], ["x", "y"]), "image 2 is of class 2"),
    "names of names": (Named(["x", "y"], ["x", "y"]), "image 0 is of class 'x'"),
    "nan": (pairs(labels=[0.0, 1.0, float("nan")]), "image 2 is of class nan"),
}


def load(name: str) -> Any:
    if name in REFUSED:
        return REFUSED[name]()
    images, _ = (SERVED | LABELS)[name]
    return images, images


def own(name: str, *words: str) -> tuple[str, ...]:
    source = ("dataset=custom", f"dataset.source={HERE}:load", f"+dataset.options.name={name!r}")
    return (*source, *TINY, *words)


@pytest.mark.parametrize("name", SERVED)
def test_any_sequence_of_pairs_is_trained_on_and_evaluated(here: Path, name: str):
    assert train(*own(name), "name=run").status == 0
    result = evaluate("run=outputs/run", f"dataset.source={HERE}:load", "predictions=x.csv")
    assert result.status == 0 and "on 12 images of custom" in result.out, result.err
    _, *rows = (here / "x.csv").read_text().splitlines()
    labels = SERVED[name][1]
    order = [1, 2, 0] if labels[0] == "ant" else [2, 1, 0] if labels[0] == "8" else [0, 1, 2]
    assert [row.split(",")[:2] for row in rows] == [
        [str(i), labels[order[i % 3]]] for i in range(12)
    ]
    summary = Run("outputs/run").summary
    assert summary["data"]["images"].startswith("12 + 12 images of 3 classes")
    assert summary["top5_last"] == 100 > summary["top1_last"]  # there are only three classes


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_function_gets_wrong_ends_in_one_line(here: Path, name: str):
    result = train(*own(name))
    assert result.status == 2 and len(result.lines) == 1, result.err
    assert "dataset.source" in result.err
    assert not [*here.iterdir()]
    if name == "an error":
        assert "KeyError" in result.err
        assert f"{Path(__file__).name}:" in result.err
        for place in ("nowhere:load", f"{HERE}:nothing"):
            result = train("dataset=custom", f"dataset.source={place}", *TINY)
            assert result.status == 2
            assert len(result.lines) == 1
            assert place in result.err


@pytest.mark.parametrize("name", LABELS)
def test_labels_that_are_none_are_refused_with_the_first_place(here: Path, name: str):
    result = train(*own(name))
    assert result.status == 2 and len(result.lines) == 1, result.err
    assert LABELS[name][1] in result.err
    assert not [*here.iterdir()]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("+dataset.options.size=3",),
            "unexpected keyword argument 'size'; its arguments are name",
        ),
        (("~dataset.options.name",), "missing a required argument: 'name'"),
        (("dataset.root=x",), "unexpected keyword argument 'root'"),
    ],
)
def test_arguments_that_a_function_does_not_take_are_named(
    here: Path, words: tuple[str, ...], told: str
):
    result = train(*own("arrays", *words))
    assert result.status == 2 and len(result.lines) == 1, result.err
    assert told in result.err
    assert "Error" not in result.err


def late(name: str) -> Any:
    return [*pairs(), ("no image", "cat")], pairs()


def test_image_that_fails_later_ends_the_run_and_is_named(here: Path):
    words = ["dataset=custom", f"dataset.source={HERE}:late", "+dataset.options.name=x", *TINY]
    result = train(*words, "name=run")
    assert result.status == 1
    assert "image 12: no readable image" in result.lines[-1]
    assert Run("outputs/run").summary["status"] == "failed"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bug_of_the_function_keeps_its_traceback(here: Path, workers: int):
    with disturbed("fail", at=30 if workers == 0 else 29):
        result = train(*OWN, *SMALL, f"dataset.workers={workers}", "dataset.eval_limit=null")
    assert result.status == 1
    assert "what\never" in result.err
    assert "Traceback" in result.err
    assert "tests/images.py" in result.err


class Dying(list[tuple[Any, Any]]):
    """Its 7th image kills the loader's worker that reads it, as the system does without memory."""

    def __getitem__(self, index: Any) -> Any:
        if index == 6 and os.environ[NUMBER] == "1" and torch.utils.data.get_worker_info():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def dying() -> Any:
    return Dying(pairs()), pairs()


def test_dead_worker_ends_a_run_that_can_resume(here: Path, monkeypatch: pytest.MonkeyPatch):
    source = ("dataset=custom", f"dataset.source={HERE}:dying", *TINY, "dataset.workers=1")
    words = (*source, "name=run", "resume=auto")
    monkeypatch.setenv(NUMBER, "1")
    result = train(*words)
    assert result.status == 1
    assert len(result.lines) == 1
    assert "dataset.workers" in result.err
    assert Run("outputs/run").summary["status"] == "failed"
    monkeypatch.setenv(NUMBER, "0")
    assert train(*words).status == 0


def test_limits_keep_classes_balanced(here: Path):
    words = [x for x in SMALL if "limit" not in x]
    with recorded(here / "log"):
        result = train(*OWN, *words, "dataset.limit=20", "dataset.eval_limit=10", "recipe.epochs=1")
    assert "on 20 images of custom, 10 classes, 10 held out" in result.out, result.err
    reads = [line.split()[:2] for line in (here / "log").read_text().splitlines()]
    for half, data, each in (("train", digits()[0], 2), ("held_out", digits()[1], 1)):
        read = {int(index) for name, index in reads if name == half}
        assert np.bincount([data.targets[i] for i in read]).tolist() == [each] * 10
    for limit in ("dataset.limit=9", "dataset.limit=61", "dataset.eval_limit=31"):
        result = train(*OWN, *words, limit)
        assert result.status == 2
        assert len(result.lines) == 1
        assert limit in result.err


# Other data than those of a run

FOLDER = ("dataset=image_folder", "dataset.root=d", *TINY)


@pytest.mark.parametrize("change", ["names", "order", "size"])
def test_finished_run_is_not_the_result_of_other_images(here: Path, change: str):
    write_images(here / "d", ["ant", "bee", "cat"], train=4, held_out=1, size=16)
    assert train(*FOLDER).status == 0
    (path,) = (here / "outputs").iterdir()
    again = train(*FOLDER, "resume=auto")
    assert again.status == 0
    assert "top-1" in again.out
    assert not again.err
    image = here / "d" / "train" / "ant" / "0.png"
    if change == "size":
        Image.open(image).convert("L").save(image)
    else:
        image.rename(image.with_name("9.png" if change == "names" else "3.png"))
        if change == "order":
            write_images(here / "e", ["ant"], train=4, held_out=1, size=16)
            os.rename(here / "e/train/ant/0.png", image)
    before = snapshot()
    for more in ([], ["-m", "seed=1,0"]):
        result = train(*more, *FOLDER, "resume=auto")
        assert result.status == 2
        assert len(result.lines) == 1
        assert snapshot() == before
        assert path.name in result.err
        assert "data" in result.err
    assert train(*FOLDER, "resume=auto", "name=other").status == 0


def test_spellings_of_a_folder_are_one_run(here: Path):
    write_images(here / "d", ["ant", "bee"], train=1, held_out=1)
    (here / "e").symlink_to("d")
    roots = ("d", "d/", "./d", "e/../d"), ("e",)
    first, second = ({dry(*FOLDER, f"dataset.root={root}")[1] for root in x} for x in roots)
    assert len(first) == len(second) == 1
    assert first != second


def counted() -> Any:
    number = int(os.environ[NUMBER])
    return pairs(labels=NAMES[number % 2 :] + NAMES[: number % 2], count=9 + number // 2), pairs()


@pytest.mark.parametrize("now", ["1", "2"])
def test_function_that_returns_other_images_is_noticed(
    here: Path, monkeypatch: pytest.MonkeyPatch, now: str
):
    """Other classes, and other numbers of them, by a function of the same name and options."""
    words = ["dataset=custom", f"dataset.source={HERE}:counted", *TINY, "name=run", "resume=auto"]
    monkeypatch.setenv(NUMBER, "0")
    assert train(*words).status == 0
    assert train(*words).status == 0
    before = snapshot()
    monkeypatch.setenv(NUMBER, now)
    result = train(*words)
    assert result.status == 2
    assert len(result.lines) == 1
    assert snapshot() == before


def test_run_without_a_checkpoint_begins_anew_on_mended_images(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    write_images(here / "d", ["ant", "bee", "cat"], train=4, held_out=1, size=16)
    image = here / "d" / "train" / "ant" / "2.png"
    content = image.read_bytes()
    image.write_bytes(b"none")
    monkeypatch.setattr(halves, "MOST_MEMORY", 0)
    words = [*FOLDER, "name=mine", "resume=auto"]
    failed = train(*words)
    assert failed.status == 1
    assert "ant/2.png" in failed.err
    image.write_bytes(content)
    assert train(*words).status == 0


def test_weights_of_the_same_name_may_be_others(here: Path):
    assert train(*own("arrays"), "name=first").status == 0
    state = Run("outputs/first").best()
    save_file(state, here / "w.safetensors")
    words = [*own("arrays"), "model.weights=w.safetensors", "name=run", "resume=auto"]
    for _ in range(2):
        assert train(*words).status == 0
    save_file({name: torch.zeros_like(value) for name, value in state.items()}, "w.safetensors")
    result = train(*words)
    assert result.status == 2
    assert len(result.lines) == 1
    assert "model.weights" in result.err


# The examples of the page on random images

PAGE = (ROOT / "docs" / "using.md").read_text().partition("### Images from a function\n")[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.partition("\n##")[0], re.DOTALL)


def write_stl10(root: Path) -> None:
    """Writes random images in the format of STL-10: two of each class, one in the test set."""
    root.mkdir(parents=True)
    (root / "class_names.txt").write_text("\n".join(f"class{i}" for i in range(10)) + "\n")
    for split, each in (("train", 2), ("test", 1)):
        labels = np.arange(10 * each, dtype=np.uint8) % 10 + 1
        labels.tofile(root / f"{split}_y.bin")
        noise = np.random.default_rng(each).integers(0, 99, (10 * each, 3, 96, 96), np.uint8)
        (noise + 15 * labels[:, None, None, None]).astype(np.uint8).tofile(root / f"{split}_X.bin")


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


def test_examples_of_the_page_train_and_evaluate(here: Path, monkeypatch: pytest.MonkeyPatch):
    for name, code in zip(("stl10", "hub"), EXAMPLES, strict=True):
        (here / f"{name}.py").write_text(code)
    write_stl10(here / "data" / "stl10_binary")
    splits = {"train": Rows(12), "test": Rows(6)}
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda name: splits))
    monkeypatch.syspath_prepend(here)
    hub = ["+dataset.options.name=beans", "+dataset.options.label=labels"]
    for source, options, size, images in (("stl10", [], 96, 20), ("hub", hub, 8, 12)):
        data = ["dataset=custom", f"dataset.source={source}:load", *options]
        words = [f"name={source}", *data, *TINY, f"model.image_size={size}", "dataset.workers=1"]
        result = train(*words)
        assert result.status == 0 and f"on {images} images of custom" in result.out, result.err
        run = Run(f"outputs/{source}")
        evaluated = evaluate(f"run={run.path}", f"dataset.source={source}:load")
        assert evaluated.status == 0, evaluated.err
        assert run.evaluation()["top1"] == run.summary["top1_last"]
        resumed = train(*words, "resume=auto")  # refused if it were another run
        assert resumed.status == 0
        assert "top-1" in resumed.out
        assert run.summary["data"]["images"].startswith(f"{images} + {images // 2} images")
