"""Keys that choose a function: own paths in every program and child, mistakes, other code."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reproduction.errors import UserError
from reproduction.training.trial import check_capture
from tests.programs import (
    SMALL,
    Overrides,
    Run,
    assert_refused,
    assert_succeeded,
    config_of,
    evaluate,
    line_of,
    runs,
    script,
    snapshot,
    train,
    trained,
)

ONE = (SMALL, "recipe.epochs=1", "recipe.max_steps=2")
MODULE = """
from reproduction.data import sources


def images():
    return sources.digits()


def modelling(num_classes):
    return lambda images: images


def matching():
    return lambda samples: samples.donors


def choosing():
    return lambda samples: samples.mask_of


def labels():
    return lambda samples: samples.saliency[:, :2]


def detecting():
    return lambda entry: entry.tokens[:, :3, 0]


def measuring():
    return lambda logits, classes: [1, 2, 3]


def losing():
    return lambda output, batch, step: output.logits


def optimizing(groups, lr, weight_decay):
    return groups


def failing(*given, **named):
    raise KeyError("a key of mine")


number = 3
"""
IMAGES: Overrides = (
    "dataset=custom",
    "dataset.source=tokenmixup_of_mine:images",
    "dataset.workers=0",
)
# a key -> the overrides beside it, but for its path
KEYS: dict[str, tuple[Overrides, str]] = {
    "dataset.source": ("dataset=custom", "images"),
    "model.source": (("model=custom",), "modelling"),
    "augmentation.htm.matching": ((), "matching"),
    "augmentation.htm.mask_rule": ((), "choosing"),
    "augmentation.htm.labels": ((), "labels"),
    "augmentation.htm.detector": ((), "detecting"),
    "recipe.optimizer": ((), "optimizing"),
    "recipe.loss": ((), "losing"),
    "recipe.metrics.mine": ((), "measuring"),
}
OPTIONS = {"model.source": "model.options", "recipe.metrics.mine": "recipe.metrics_options.mine"}
MISTAKES = {  # path -> what the line names
    "{name}.": "must be",
    "nowhere_of_tests:{name}": "No module named 'nowhere_of_tests'",
    "tokenmixup_of_mine:{name}s_of": "has no attribute '{name}s_of'",
    "tokenmixup_of_mine:number": "'int' object is not callable",
    "tokenmixup_of_mine:failing": "KeyError: 'a key of mine' ({file}",
    "tokenmixup_of_mine/{name}": "must be",
}


@pytest.fixture(autouse=True)
def module(here: Path) -> Iterator[Path]:
    path = here / "tokenmixup_of_mine.py"
    path.write_text(MODULE)
    yield path


def small(overrides: Overrides) -> Overrides:
    """A model of one's own does not have the sizes of ours."""
    return (ONE[0][1:] if "model=custom" in overrides else ONE[0], ONE[1:], overrides)


def plus(key: str) -> str:
    """Before a key that no file has."""
    return "+" if key.startswith("recipe.metrics.") else ""


@pytest.mark.parametrize("key", KEYS)
def test_a_mistyped_path_is_one_line(key: str, module: Path):
    overrides, name = KEYS[key]
    before = snapshot()
    mistakes = {f"tokenmixup_of_mine:{name[:-1]}": f"has no attribute '{name[:-1]}'"}
    if key in ("dataset.source", "augmentation.htm.matching"):  # others go the same way
        mistakes |= MISTAKES
    for path, told in mistakes.items():
        override = f"{plus(key)}{key}={path.format(name=name)}"
        named = [key, told.format(name=name, file=module)]
        assert_refused(train(small(overrides), override), *named)
    assert snapshot() == before


@pytest.mark.parametrize("key", [key for key in KEYS if key != "dataset.source"])
def test_an_option_that_code_does_not_take_is_one_line(key: str):
    overrides, name = KEYS[key]
    group, _, last = key.rpartition(".")
    option = f"+{OPTIONS.get(key, f'{group}.{last}_options')}.size=3"
    result = train(small(overrides), f"{plus(key)}{key}=tokenmixup_of_mine:{name}", option)
    assert_refused(result, "size", "unexpected keyword argument")
    assert not runs()


def test_a_module_in_the_folder_of_the_command_is_found_by_every_program():
    """Also by eval.py, which runs it only if it is asked to."""
    one = trained(IMAGES, ONE)
    assert one.summary["code"].keys() == {"dataset.source"}
    told = "to run it, add dataset.source=tokenmixup_of_mine"
    assert_refused(evaluate(f"run={one.path}"), told)
    override = "dataset.source=tokenmixup_of_mine:images"
    assert_succeeded(evaluate(f"run={one.path}", override, apart=True), "images of custom")
    for same in (f"++{override}", "dataset.source='tokenmixup_of_mine:images'"):
        assert_succeeded(evaluate(f"run={one.path}", same), "images of custom")


def test_no_function_of_ours_but_those_of_the_table_runs_unasked():
    """A configuration from elsewhere may name what a module of ours has imported."""
    run = trained(ONE, "augmentation=[]")
    path = run.path / "config.yaml"
    text = path.read_text()
    for place in ("reproduction.data.sources:os.system", "reproduction.files:write_text"):
        path.write_text(text.replace("reproduction.data.sources:digits", place))
        summary = run.path / "summary.json"
        summary.unlink(missing_ok=True)
        assert_refused(evaluate(f"run={run.path}"), f"to run it, add dataset.source={place}")


def changed(module: Path) -> None:
    """Writes a later version of a module, and forgets the one that is loaded."""
    module.write_text(f"{module.read_text()}\n# later\n")
    del sys.modules[module.stem]


def test_other_code_does_not_resume_a_run_and_is_named_in_tables(module: Path):
    overrides = (ONE, IMAGES, "name=mine-${seed}", "resume=auto")
    assert_succeeded(train(overrides, "seed=0"))
    first = Run("outputs/mine-0").summary["code"]["dataset.source"]
    assert "several versions" not in script("runs", "outputs").out
    changed(module)
    result = train(overrides, "seed=0")
    assert_refused(result, "other code", f"{first} then, tokenmixup_of_mine.py with sha256")
    assert_succeeded(train(overrides, "seed=1"))
    shown = script("runs", "outputs").out
    assert "of several versions of code" in shown
    assert first in shown


CAPTURABLE = """
def matching():
    return lambda samples: samples.donor


matching.capturable = True
"""


def test_a_graph_is_captured_of_code_that_says_it_can_be(module: Path):
    """Also of ours: the gradient of the input is another pass, and other optimisers wait."""
    graph = [*line_of(ONE), "compile=cuda-graph", "augmentation=[htm]"]
    matching = "augmentation.htm.matching=tokenmixup_of_mine:matching"
    for override in (
        matching,
        "augmentation.htm.detector=gradient",
        "recipe.optimizer=timm.optim:Lion",
    ):
        with pytest.raises(UserError, match="cannot be captured"):
            check_capture(config_of(graph, override))
    check_capture(config_of(graph))
    module.with_name("mine_captured.py").write_text(CAPTURABLE)
    check_capture(config_of(graph, "augmentation.htm.matching=mine_captured:matching"))
