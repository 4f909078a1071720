"""Own data: what a function may return, what is refused, and the examples of docs/data.md."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from reproduction.config import ROOT
from reproduction.data.custom import OwnImages, load
from reproduction.data.folders import DATASETS
from reproduction.data.record import record_of
from reproduction.data.sources import build_source
from reproduction.runs.compose import compose
from reproduction.runs.folder import RunFolder
from reproduction.runs.identity import run_hash
from reproduction.runs.parse import parse_saved
from reproduction.start.resolve import resolve
from reproduction.system.errors import PlainError, UserError
from reproduction.training.endings import explaining_data
from tests.reproduction.conftest import SMALL, Command, config_of, load_source

HERE = __name__
PIXELS = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
NAMES = ["cat", "dog", "ant"]


class Torchvision(list[tuple[Any, Any]]):
    """Pairs whose classes are not read from them."""

    @property
    def targets(self) -> list[int]:
        return [i % 3 for i in range(12)]


def pairs(count: int = 12, kind: str = "array") -> list[tuple[Any, Any]]:
    convert: Callable[[np.ndarray], Any] = {
        "array": np.array,
        "grey": lambda pixels: pixels[:, :, 0],
        "image": Image.fromarray,
        "float": lambda pixels: pixels / 255,
    }[kind]
    return [(convert(PIXELS[i]), NAMES[i % 3]) for i in range(count)]


def whole(count: int = 12, kind: str = "array") -> Any:
    return pairs(count, kind), pairs(6)


RETURNED: dict[str, tuple[Any, list[str], list[int]]] = {
    "arrays": (pairs(), ["ant", "cat", "dog"], [1, 2, 0]),
    "grey arrays": (pairs(kind="grey"), ["ant", "cat", "dog"], [1, 2, 0]),
    "images": (pairs(kind="image"), ["ant", "cat", "dog"], [1, 2, 0]),
    "integers": ([(PIXELS[i], 10 - i % 3) for i in range(12)], ["8", "9", "10"], [2, 1, 0]),
    "arrays of one": ([(PIXELS[i], np.array([i % 3])) for i in range(12)], [*"012"], [0, 1, 2]),
    "targets": (Torchvision((x, "none") for x in PIXELS), [*"012"], [0, 1, 2]),
}


def chosen(name: str) -> Any:
    return RETURNED[name][0], RETURNED[name][0]


@pytest.mark.parametrize("name", RETURNED)
def test_any_sequence_of_pairs_is_read(name: str):
    _, classes, targets = RETURNED[name]
    own = load(f"{HERE}:chosen", {"name": name})
    assert own.classes == classes
    assert own.train.targets == targets * 4 == [own.train[i][1] for i in range(12)]
    expected = Image.fromarray(PIXELS[5][:, :, 0] if name == "grey arrays" else PIXELS[5])
    assert own.train[5][0].tobytes() == expected.convert("RGB").tobytes()
    few = own.train.take([7, 2])
    assert [few[0], few[1]] == [own.train[7], own.train[2]]


def test_limits_and_validation_apply_to_own_data():
    source = load_source("custom", None, 9, 3, validation=1 / 3, source=f"{HERE}:whole", options={})
    assert source.validation is not None
    assert [len(x) for x in (source.train, source.validation, source.held_out)] == [6, 3, 3]
    assert sorted(source.validation.targets) == sorted(source.held_out.targets) == [0, 1, 2]


def failing() -> Any:
    return {}["key"]


def one() -> Any:
    return pairs()


def uneven() -> Any:
    return Torchvision(pairs(3)), pairs()


def alone() -> Any:
    return [(PIXELS[0], 1)], [(PIXELS[0], 1)]


def foreign() -> Any:
    return pairs(2), pairs(3)


def halves() -> Any:
    return [(PIXELS[0], 0.5)], []


def mixed() -> Any:
    return [(PIXELS[0], 0), (PIXELS[0], "0")], pairs()


REFUSED = {
    "failing": rf"failing: KeyError: 'key' \({re.escape(__file__)}:\d+\)",
    "one": "must return training and .* pairs .image, class.: two sequences, not one list",
    "uneven": "3 images, 12 classes",
    "alone": "needs two classes or more, all training images are of 1",
    "foreign": "held-out images are of class 'ant', no training image is",
    "halves": "a class must be an integer or a name, not 0.5",
    "mixed": "classes must be all integers or all names",
    "missing": "AttributeError: module .* has no attribute 'missing'$",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_function_gets_wrong_ends_in_one_line(name: str):
    with pytest.raises(UserError, match=REFUSED[name]) as error:
        load(f"{HERE}:{name}", {})
    assert str(error.value).startswith(f"dataset.source={HERE}:{name}: ")


def test_image_that_is_none_is_refused_before_the_run(command: Command, tmp_path: Path):
    own = ["dataset=custom", f"dataset.source={HERE}:whole", "dataset.workers=0", "device=cpu"]
    result = command("train", *own, "+dataset.options.kind=float", "recipe.batch_size=4")
    assert result.status == 2 and result.lines == [
        "train.py: the first training image: dataset.source: image 0: no readable image: "
        "TypeError: must be a PIL image or an array of 8 bits a channel, is float64"
    ]
    assert not [*tmp_path.iterdir()]


def test_image_that_fails_later_is_named_without_advice_for_files():
    images = OwnImages([(np.zeros((3, 8, 8), np.uint8), 0)], [0], [0])
    with pytest.raises(PlainError) as error, explaining_data():
        images[0]
    assert str(error.value) == (
        "dataset.source: image 0: no readable image: TypeError: must be an array h w or h w 3, has "
        "the shape (3, 8, 8)"
    )


def own_config(*overrides: str, source: str = f"{HERE}:whole") -> Any:
    args = ["dataset=custom", f"dataset.source={source}", "dataset.workers=0", *overrides]
    return resolve(compose("train", args))


def test_identity_holds_source_options_lengths_and_classes(monkeypatch: pytest.MonkeyPatch):
    config = own_config()
    assert config.dataset.content is not None
    assert config.dataset.content.startswith("12 + 6 images of 3 classes ")
    hashes = {run_hash(config), run_hash(own_config("+dataset.options.count=12"))}
    hashes.add(run_hash(own_config("+dataset.options.count=9")))
    assert len(hashes) == 3
    load.__globals__["_load"].cache_clear()
    monkeypatch.setattr(sys.modules[HERE], "NAMES", ["cat", "dog", "bee"])
    assert run_hash(own_config()) not in hashes


def test_classes_in_another_order_are_other_data(monkeypatch: pytest.MonkeyPatch):
    forget = load.__globals__["_load"].cache_clear
    forget()
    config, kept = own_config(), record_of(own_config())["images"]
    assert kept.startswith("12 + 6 images of 3 classes, order ")
    forget()
    monkeypatch.setattr(sys.modules[HERE], "NAMES", ["dog", "cat", "ant"])
    assert run_hash(own_config()) == run_hash(config)
    assert record_of(own_config())["images"] != kept


def test_function_is_not_imported_for_plans_and_saved_configurations():
    config = config_of("dataset=custom", "dataset.source=nowhere:load", needs_data=False)
    assert config.dataset.source == "nowhere:load" and "nowhere" not in sys.modules
    saved = compose("train", ["dataset=custom", "dataset.source=nowhere:load"]).raw | {"name": "x"}
    with pytest.raises(UserError, match=r"add dataset\.source=nowhere:load"):
        parse_saved(saved)
    assert parse_saved(saved, needs_data=False).dataset.name == "custom"
    assert "nowhere" not in sys.modules


def test_every_entry_of_the_table_has_a_file_and_a_function():
    files = {path.stem for path in (ROOT / "conf" / "dataset").glob("*.yaml")}
    assert files == set(DATASETS)
    with pytest.raises(UserError, match=r"dataset\.name=mnist: must be one of digits, "):
        config_of("dataset.name=mnist")


# The examples of docs/data.md on random images

EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)


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
        label = SimpleNamespace(names=NAMES)
        self.count, self.features = count, {"labels": label}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: Any) -> Any:
        if key == "labels":
            return [i % 3 for i in range(self.count)]
        return {"image": Image.fromarray(PIXELS[key]), "labels": key % 3}


def test_examples_of_the_page_train_and_evaluate(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, code in zip(("stl10", "hub"), EXAMPLES, strict=True):
        (tmp_path / f"{name}.py").write_text(code)
    write_stl10(tmp_path / "data" / "stl10_binary")
    splits = {"train": Rows(12), "test": Rows(6)}
    stand_in = SimpleNamespace(load_dataset=lambda name: splits)
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    monkeypatch.syspath_prepend(tmp_path)
    small = [*SMALL[:1], "device=cpu", "recipe.epochs=1", "recipe.batch_size=8"]
    hub = ["+dataset.options.name=beans", "+dataset.options.label=labels"]
    for source, options, size, images in (("stl10", [], 96, 20), ("hub", hub, 8, 12)):
        own = ["dataset=custom", f"dataset.source={source}:load", *options, "dataset.workers=1"]
        args = [f"name={source}", *own, f"model.image_size={size}", *small]
        result = command("train", *args)
        assert result.status == 0, result.err
        assert f"on {images} images of custom" in result.out
        run = RunFolder(tmp_path / "outputs" / source)
        refused = command("eval", f"run={run.path}")
        assert refused.status == 2
        assert refused.lines[0].endswith(f"names it: add dataset.source={source}:load")
        evaluated = command("eval", f"run={run.path}", f"dataset.source={source}:load")
        assert evaluated.status == 0, evaluated.err
        result = json.loads((run.path / "evaluation-last.json").read_text())
        assert result["top1"] == run.read_summary()["top1_last"]
        if source == "hub":  # the other options stay those of the run
            other = ["dataset.source=hub:load", "+dataset.options.test=train"]
            more = command("eval", f"run={run.path}", *other)
            assert "on 12 images of custom" in more.out, more.err
        resumed = command("train", *args, "resume=auto")  # refused if it were another run
        assert resumed.status == 0 and "top-1" in resumed.out


def test_built_source_is_that_of_the_function():
    source = build_source(own_config("+dataset.options.count=9").dataset)
    assert (len(source.train), len(source.held_out), source.validation) == (9, 6, None)
    assert source.per_epoch is source.held_out
