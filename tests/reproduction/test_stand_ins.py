"""Stand-in images have the layout of the data sets that they stand for."""

import shutil
from itertools import product
from pathlib import Path

import pytest

from reproduction.data.folders import missing_data
from reproduction.data.stand_ins import make_stand_ins
from tests.reproduction.conftest import load_source


@pytest.mark.parametrize(
    ("name", "classes", "train", "held_out"),
    [
        ("cifar10", 10, 100, 50),
        ("cifar100", 100, 200, 100),
        ("imagenet1k", 1000, 1000, 1000),
        ("image_folder", 10, 80, 40),
    ],
)
def test_stand_ins_are_read_by_the_loaders_of_their_data_sets(
    tmp_path, name, classes, train, held_out
):
    make_stand_ins(name, tmp_path / "here" / name)
    make_stand_ins(name, tmp_path / "there" / name)
    source = load_source(name, str(tmp_path / "here" / name), None)
    again = load_source(name, str(tmp_path / "there" / name), None)
    assert (len(source.train), len(source.held_out)) == (train, held_out)
    assert len(source.classes) == len(set(source.train.targets)) == classes
    image, target = source.train[3]
    assert image.size == (32, 32) and image.mode == "RGB"
    assert image.tobytes() == again.train[3][0].tobytes() and target == again.train[3][1]
    assert image.tobytes() != source.train[4][0].tobytes()
    assert [path.name for path in (tmp_path / "here").iterdir()] == [name]


def test_stand_ins_have_the_synsets_of_imagenet(tmp_path: Path):
    root = tmp_path / "imagenet1k"
    make_stand_ins("imagenet1k", root)
    assert missing_data("imagenet1k", str(root)) is None
    shutil.rmtree(root / "val" / "n15075141")
    assert "'n15075141' is only in" in str(missing_data("imagenet1k", str(root)))
    shutil.rmtree(root / "train" / "n15075141")
    assert "'n15075141' is missing" in str(missing_data("imagenet1k", str(root)))


def test_numbered_folders_are_not_imagenet(tmp_path: Path):
    """Their alphabetical order would give folder 2 the class 112."""
    for split, number in product(("train", "val"), range(1000)):
        (tmp_path / split / str(number)).mkdir(parents=True)
    assert "'0' is none of them" in str(missing_data("imagenet1k", str(tmp_path)))
