"""Image folders and CIFAR: which files are read and how, and what is refused."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100

from tests.images import write_cifar, write_images
from tests.programs import (
    Run,
    assert_refused,
    assert_succeeded,
    evaluate,
    load_run,
    overrides_of,
    predictions,
    same,
    train,
    trained,
)

TINY = overrides_of("""
    model.image_size=32 model.embed_dim=16 recipe.epochs=1 recipe.batch_size=4
    recipe.transforms.eval_crop_pct=1 dataset.workers=0 device=cpu augmentation=[]
""")
FOLDER = ("dataset=image_folder", "dataset.root=images", TINY)
Change = Callable[[Path], None]
NOISE = np.random.default_rng(0).integers(0, 256, (32, 32, 4), dtype=np.uint8)
RGB = Image.fromarray(NOISE[..., :3])
PALETTE = RGB.convert("P")


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[274] = orientation
    return exif


@pytest.fixture
def images(here: Path) -> Path:
    """Three images of two classes, and two held-out ones of each."""
    return write_images(here / "images", ["cat", "dog"], train=3, held_out=2)


@pytest.fixture
def run(images: Path) -> Run:
    return trained(FOLDER)


def shown(run: Run, path: Path | str) -> np.ndarray:
    """The pixels `h w 3` of a file that a trained run would see."""
    data = run.config["dataset"]
    mean = torch.tensor(data["mean"])[:, None, None]
    std = torch.tensor(data["std"])[:, None, None]
    pixels = load_run(run.path).transform(path) * std + mean
    return (255 * pixels).round().byte().permute(1, 2, 0).numpy()


def test_images_are_seen_upright_and_on_white(run: Run):
    """Of one that is turned, with hidden colours; and of a palette with transparent ones."""
    rgba = NOISE.copy()
    is_hidden = NOISE[..., 3] < 128
    rgba[..., 3] = np.where(is_hidden, 0, 255)
    Image.fromarray(rgba).save("x.png", exif=oriented(6))
    expected = np.where(is_hidden[..., None], 255, rgba[..., :3])
    assert np.array_equal(shown(run, "x.png"), expected[::-1].swapaxes(0, 1))
    hidden = PALETTE.getpixel((9, 9))
    PALETTE.save("x.png", transparency=hidden)
    is_hidden = np.array(PALETTE)[..., None] == hidden
    expected = np.where(is_hidden, 255, np.array(PALETTE.convert("RGB")))
    assert np.array_equal(shown(run, "x.png"), expected)


def test_images_are_the_same_from_workers(images: Path):
    RGB.resize((40, 20)).save(images / "val" / "dog" / "0.png", exif=oriented(8))
    alone = trained(FOLDER, name="alone")
    workers = trained(FOLDER, "dataset.workers=2", name="workers")
    assert same(alone, workers) == []


def test_classes_are_the_folders_and_other_files_are_left_out(images: Path):
    (images / "train/cat/deep/er").mkdir(parents=True)
    RGB.save(images / "train/cat/deep/er/x.JPEG")
    for name in ("train/.ipynb_checkpoints", "train/@eaDir", "val/__MACOSX", "train/cat/.thumbs"):
        (images / name).mkdir()
        RGB.save(images / name / "x.png")
    for name in ("a.heic", "b.HEIC", "notes.txt", "README", "._0.png"):
        (images / "train/dog" / name).touch()
    (images / "train/list.csv").touch()
    RGB.save(images / "train/beside.png")
    (images / "val").rename(images / "test")
    result = train(FOLDER, "name=mine")
    assert_succeeded(result, "on 7 images of image_folder, 2 classes, 4 held out")
    assert load_run("outputs/mine").classes == ["cat", "dog"]


def test_imagenet_is_seen_as_it_is_stored(images: Path):
    """As the published accuracies see it."""
    RGB.save(images / "val/cat/0.png", exif=oriented(8))
    trained("dataset=imagenet1k", "dataset.root=images", TINY)
    assert_succeeded(evaluate("run=outputs/mine", "predictions=x.csv"))
    model, transform, classes = load_run("outputs/mine")
    row = predictions("x.csv")[0]
    with torch.no_grad():
        stored, turned = model(transform([RGB, RGB.rotate(90)])).softmax(1)
    place = classes.index(row["predicted"])
    found = float(row["probability"])
    assert found == pytest.approx(float(stored[place]), abs=1e-5)
    assert found != pytest.approx(float(turned[place]), abs=1e-5)
    images.rename("moved")
    again = train("dataset=imagenet1k", "dataset.root=moved", TINY, "name=mine", "resume=auto")
    assert_succeeded(again, "mine: top-1")


def empty_class(root: Path) -> None:
    for path in (root / "train/cat").iterdir():
        path.unlink()


def empty_held_out_class(root: Path) -> None:
    for path in (root / "val/dog").iterdir():
        path.unlink()


def held_out_class_of_its_own(root: Path) -> None:
    shutil.copytree(root / "val/dog", root / "val/elk")


def no_held_out_images(root: Path) -> None:
    (root / "val").rename(root / "held_out")


def no_folder(root: Path) -> None:
    root.rename("elsewhere")


def no_class_folder(root: Path) -> None:
    shutil.rmtree(root / "train")
    (root / "train").mkdir()


REFUSED: dict[Change, str] = {  # what is done to the folder -> part of the line
    empty_class: "cat",
    empty_held_out_class: "dog",
    held_out_class_of_its_own: "elk",
    no_held_out_images: "val",
    no_folder: "images/train",
    no_class_folder: "class folder in images/train",
}


@pytest.mark.parametrize(("change", "part"), REFUSED.items())
def test_folder_that_is_no_data_set_is_refused_in_one_line(images: Path, change: Change, part: str):
    change(images)
    assert_refused(train(FOLDER), "dataset.root=", part)
    assert not Path("outputs").exists()


# CIFAR


@pytest.mark.parametrize(("name", "kind"), [("cifar10", CIFAR10), ("cifar100", CIFAR100)])
def test_cifar_is_unpacked_on_first_use_and_mended(
    here: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: Any
):
    write_cifar(here / "data", kind, monkeypatch)
    overrides = (f"dataset={name}", "dataset.root=data", TINY, "recipe.batch_size=100")
    result = train(overrides, "name=mine")
    train_images = kind("data", train=True)
    held_out = kind("data", train=False)
    number = len(held_out)  # one of each class
    counts = f"{len(train_images)} images of {name}, {number} classes, {number} held out"
    assert_succeeded(result, counts)
    batch = here / "data" / kind.base_folder / kind.test_list[0][0]
    batch.write_bytes(batch.read_bytes()[:99])  # is unpacked again
    assert_succeeded(evaluate("run=outputs/mine", "predictions=x.csv"))
    rows = predictions("x.csv")
    assert [row["class"] for row in rows] == [held_out.classes[i] for i in held_out.targets]
    model, transform, _ = load_run("outputs/mine")
    pictures = [picture for picture, _ in held_out]
    with torch.no_grad():
        best = model(transform(pictures)).softmax(1).max(1)
    found = [float(row["probability"]) for row in rows]
    assert found == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_failed_download_names_the_file(here: Path, monkeypatch: pytest.MonkeyPatch):
    write_cifar(here / "data", CIFAR10, monkeypatch).write_bytes(b"half a download")
    result = train("dataset=cifar10", "dataset.root=data", TINY)
    assert_refused(result, "dataset.root=data", CIFAR10.url)
