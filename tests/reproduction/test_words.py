"""A word means what was typed: on every command line, and in files of studies."""

from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from tests.doors import (
    SMALL,
    assert_refused,
    assert_succeeded,
    config_of,
    evaluate,
    runs,
    script,
    train,
    value_of,
)

ONE = (SMALL, "recipe.epochs=1")
FREE = ("logger.wandb", "dataset.options", "recipe.loss_options", "augmentation.htm.labels_options")
# What Hydra's grammar itself gives a meaning: lists, sweeps, functions, interpolation, escapes.
GRAMMAR = "[]{}(),$\\"
PLAIN = st.characters(codec="utf-8", exclude_categories=["C"], exclude_characters=GRAMMAR + "'\"")


@given(st.text(PLAIN).map(str.strip))
@example("~/pics")
@example("caf\xe9")
@example("data #2")
@example("a=b: c")
@example("2026_11_26")
@example("010")
@example("1e3")
@example("true")
def test_a_key_of_texts_takes_the_text_that_was_typed(text: str):
    if text.lower() != "null":
        assert value_of(f"output_root={text}") == value_of(f"output_root = {text} ") == text


@pytest.mark.parametrize("text", ["it's", "'twas", 'five"', "the '90s", "o'clock #2"])
def test_an_apostrophe_is_a_letter(text: str):
    assert value_of(f"name={text}") == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-1e-3", -1e-3),
        ("null", None),
        ("true", True),
        ("[1,two]", [1, "two"]),
        ("{a: 1}", {"a": 1}),
        ("'1'", "1"),
        ('"it\'s"', "it's"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("no", "no"),
        ("['~/a',{b: 1}]", ["~/a", {"b": 1}]),
    ],
)
def test_what_hydra_reads_it_reads_alone(text: str, value: object):
    assert value_of(f"key={text}") == value


def test_every_program_reads_alike(here: Path):
    name = "it's caf\xe9 #"
    assert_succeeded(train("-m", "seed=1,2", f"name={name}${{seed}}", ONE))
    assert [run.path.name for run in runs()] == [f"{name}1", f"{name}2"]
    assert_succeeded(evaluate(f"run=outputs/{name}1", f"predictions={name}.csv", "device=cpu"))
    assert Path(f"{name}.csv").exists()
    another = evaluate(f"run=outputs/{name}1", "++dataset=cifar10")
    assert_refused(another, "groups is not supported: '++dataset=cifar10'")
    assert config_of("output_root=~/x").output_root == str(Path("~/x").expanduser())


@pytest.mark.parametrize("value", ["'table1/cifar10_htm'", "[table1/cifar10_htm]"])
def test_a_name_has_what_a_word_means(here: Path, value: str):
    listed = train("dry_run=1", "experiment=table1/cifar10_htm")
    assert_succeeded(listed, "outputs/table1-cifar10_htm-s0-")
    assert train("dry_run=1", f"experiment={value}").out == listed.out


def test_a_file_of_a_study_is_read_as_typed(here: Path):
    words = ["dataset=image_folder", "dataset.root=~/pics", "model.weights=a #2"]
    study = {"title": "t", "rows": {"no": words}}
    text = yaml.safe_dump(study).replace("'no'", "no")
    for seeds, status in (("010", 2), ("1_0", 2), ("0x1", 2), ("1:30", 2), ("1", 0)):
        Path("mine.yaml").write_text(f"{text}seeds: {seeds}\n")
        result = script("reproduce", "mine.yaml", "dry_run=1")
        assert result.status == status, result
        assert status == 0 or f"seeds={seeds}" in result.err
    assert "mine/no" in result.out
    Path("mine.yaml").write_text(f"{text}title: twice\n")
    assert "title" in script("reproduce", "mine.yaml", "dry_run=1").err


@pytest.mark.parametrize("group", FREE)
def test_a_key_that_the_schema_does_not_know_keeps_its_text(group: str):
    for text, value in (("2026_11", "2026_11"), ("1_0", "1_0"), ("10", 10), ("1e3", 1000.0)):
        tree = value_of(f"+{group}.key={text}")
        for name in group.split(".")[1:]:
            tree = tree[name]
        assert tree == {"key": value}
    assert value_of("seed=1_0") == 10  # by Hydra's grammar
