"""Image folders and CIFAR: which files are read and how, what is left out, and what is refused."""

import csv
import io
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100

from reproduction.data import halves
from tests.doors import Run, evaluate, load_run, same, train
from tests.images import write_cifar, write_images

TINY = (
    *("model.image_size=32", "model.embed_dim=16", "recipe.epochs=1", "recipe.batch_size=4"),
    *("recipe.transforms.eval_crop_pct=1", "dataset.workers=0", "device=cpu", "augmentation=[]"),
)
FOLDER = ("dataset=image_folder", "dataset.root=images", *TINY)
NOISE = np.random.default_rng(0).integers(0, 256, (32, 32, 4), dtype=np.uint8)
RGB = Image.fromarray(NOISE[..., :3])
PAGES = [RGB.convert("P"), RGB.rotate(90).convert("P")]


def encoded(image: Image.Image, kind: str, **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def deep_png() -> bytes:
    """An RGB PNG of 16 bits a channel, which Pillow would read as one of 8."""
    header = struct.pack(">IIBBBBB", 32, 40, 16, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1 + 32 * 2 * 3) * 40)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b""))
    )


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[274] = orientation
    return exif


READ = {
    "bits.png": encoded(RGB.convert("1"), "PNG"),
    "grey and alpha.png": encoded(RGB.convert("LA"), "PNG"),
    "palette.png": encoded(PAGES[0], "PNG", transparency=3),
    "rgba.png": encoded(Image.fromarray(NOISE), "PNG"),
    "no EXIF.png": encoded(RGB, "PNG", exif=b"Exif\0\0 none"),
    "cmyk.JPG": encoded(RGB.convert("CMYK"), "JPEG"),
    "animated.gif": encoded(PAGES[0], "GIF", save_all=True, append_images=PAGES[1:]),
    "pages.tif": encoded(RGB, "TIFF", save_all=True, append_images=PAGES),
    "small.bmp": encoded(RGB, "BMP"),
    "photo.jfif": encoded(RGB, "JPEG"),
    "photo.webp": encoded(RGB, "WEBP"),
    "another format.png": encoded(RGB, "JPEG"),
}
BROKEN = {
    "empty.png": b"",
    "text.png": b"no image",
    "half.png": encoded(RGB, "PNG")[:200],
    "half.jpg": encoded(RGB, "JPEG")[:500],
    "program.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\nshowpage\n",
    "deep grey.png": encoded(Image.fromarray(NOISE[..., 0].astype(np.uint16) * 256), "PNG"),
    "deep rgb.png": deep_png(),
    "float.tif": encoded(Image.fromarray(NOISE[..., 0].astype(np.float32)), "TIFF"),
}


@pytest.fixture
def images(here: Path) -> Path:
    """Three images of two classes, and two held-out ones of each."""
    return write_images(here / "images", ["cat", "dog"], train=3, held_out=2)


@pytest.fixture
def run(images: Path) -> str:
    assert train(*FOLDER, "name=run").status == 0
    return "outputs/run"


def test_files_of_all_kinds_are_read_and_broken_ones_named(run: str, here: Path):
    (here / "photos" / "a" / "b").mkdir(parents=True)
    for place, files in (("photos", READ), ("photos/a/b", BROKEN)):
        for name, content in files.items():
            (here / place / name).write_bytes(content)
    for name in ("notes.txt", ".hidden.png", "a/.hidden", "a/@eaDir"):
        path = here / "photos" / name
        path.touch() if path.suffix else (path.mkdir(), RGB.save(path / "x.png"))
    result = evaluate(f"run={run}", "images=photos", "predictions=x.csv")
    assert result.status == 0, result.err
    with open("x.csv", newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [row["image"] for row in rows] == sorted(f"photos/{name}" for name in READ)
    for name in BROKEN:
        (line,) = (line for line in result.lines if f"photos/a/b/{name}: " in line)
        assert "no readable image" in line
        assert ("more than 8 bits" in line) == ("deep" in name) | (name == "float.tif")
    assert len(result.lines) == len(BROKEN) + 1
    assert "1 .txt" in result.err


def shown(run: str, path: Path | str) -> np.ndarray:
    """The pixels `h w 3` of a file that a trained run would see."""
    mean = torch.tensor(Run(run).config["dataset"]["mean"])[:, None, None]
    std = torch.tensor(Run(run).config["dataset"]["std"])[:, None, None]
    pixels = (load_run(run).transform(path) * std + mean) * 255
    return pixels.round().byte().permute(1, 2, 0).numpy()


UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {  # by the standard's row and column 0
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a[::-1].swapaxes(0, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a.swapaxes(0, 1)[::-1],
}


def test_images_are_seen_upright_and_on_white(run: str, here: Path):
    for orientation, upright in UPRIGHT.items():
        for kind in ("PNG", "WEBP"):
            settings = {"lossless": True} if kind == "WEBP" else {}
            exif = oriented(orientation)
            (here / "x.png").write_bytes(encoded(RGB, kind, exif=exif, **settings))
            assert np.array_equal(shown(run, "x.png"), upright(NOISE[..., :3]))
    rgba = NOISE.copy()
    rgba[..., 3] = np.where(NOISE[..., 3] < 128, 0, 255)
    on_white = np.where(rgba[..., 3:] == 0, 255, rgba[..., :3])
    for picture, pixels in (
        (Image.fromarray(rgba), on_white),
        (Image.fromarray(rgba[..., [0, 3]]), on_white[..., [0, 0, 0]]),
    ):
        picture.save("x.png", exif=oriented(6))
        assert np.array_equal(shown(run, "x.png"), UPRIGHT[6](pixels))
    for transparency in (PAGES[0].getpixel((9, 9)), bytes(range(256))):
        PAGES[0].save("x.png", transparency=transparency)
        with Image.open("x.png") as picture:
            stored, alpha = np.split(np.array(picture.convert("RGBA"), float), [3], axis=2)
        assert np.abs(shown(run, "x.png") - (255 + (stored - 255) * alpha / 255)).max() <= 1


def test_images_are_the_same_from_memory_files_and_workers(
    images: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, content in READ.items():
        (images / "val" / "cat" / name).write_bytes(content)
        (images / "train" / "dog" / name).write_bytes(content)
    sideways = images / "val" / "dog" / "0.png"
    RGB.resize((40, 20)).save(sideways, exif=oriented(8))
    assert train(*FOLDER, "name=memory").status == 0
    monkeypatch.setattr(halves, "MOST_MEMORY", 0)
    for name, workers in (("files", 0), ("workers", 2)):
        assert train(*FOLDER, f"name={name}", f"dataset.workers={workers}").status == 0
        assert same(Run("outputs/memory"), Run(f"outputs/{name}")) == []


def test_classes_are_the_folders_and_what_is_left_out_is_counted(images: Path):
    (images / "train" / "cat" / "deep" / "er").mkdir(parents=True)
    RGB.save(images / "train" / "cat" / "deep" / "er" / "x.JPEG")
    for name in ("train/.ipynb_checkpoints", "train/@eaDir", "val/__MACOSX", "train/cat/.thumbs"):
        (images / name).mkdir()
        RGB.save(images / name / "x.png")
    for name in ("a.heic", "b.HEIC", "notes.txt", "README", "._0.png"):
        (images / "train" / "dog" / name).touch()
    (images / "train" / "list.csv").touch()
    RGB.save(images / "train" / "beside.png")
    (images / "val").rename(images / "test")
    result = train(*FOLDER, "name=run")
    assert result.status == 0, result.err
    assert "on 7 images of image_folder, 2 classes, 4 held out" in result.out
    (line,) = result.lines
    assert all(part in line for part in ("2 .heic", "1 .txt", "1 without", "1 image beside"))
    assert load_run("outputs/run").classes == ["cat", "dog"]


@pytest.mark.parametrize("kind", ["link", "copy"])
def test_validation_on_the_training_images_is_said_in_one_line(images: Path, kind: str):
    shutil.rmtree(images / "val")
    if kind == "link":
        (images / "val").symlink_to("train")
    else:
        shutil.copytree(images / "train", images / "val")
    result = train(*FOLDER)
    (line,) = result.lines
    assert result.status == 0
    assert "images/val" in line
    assert "images/train" in line


def test_imagenet_is_seen_as_it_is_stored(images: Path):
    """As the published accuracies see it."""
    RGB.save(images / "val" / "cat" / "0.png", exif=oriented(8))
    words = ["dataset=imagenet1k", "dataset.root=images", *TINY, "name=run"]
    assert train(*words).status == 0
    assert evaluate("run=outputs/run", "predictions=x.csv").status == 0
    model, transform, classes = load_run("outputs/run")
    with open("x.csv", newline="") as file:
        row = next(csv.DictReader(file))
    with torch.no_grad():
        stored, turned = model(transform([RGB, RGB.rotate(90)])).softmax(1)
    place = classes.index(row["predicted"])
    assert float(row["probability"]) == pytest.approx(float(stored[place]), abs=1e-5)
    assert float(row["probability"]) != pytest.approx(float(turned[place]), abs=1e-5)


def _emptied(folder: str) -> Callable[[Path], Any]:
    return lambda root: [path.unlink() for path in (root / folder).iterdir()]


def _one_class(root: Path) -> None:
    for split in ("train", "val"):
        (root / split / "dog").rename(root / f"{split}-dog")


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {  # change -> part of the line
    "a class without images": (_emptied("train/cat"), "cat"),
    "a held-out class without images": (_emptied("val/dog"), "dog"),
    "one class": (_one_class, "two classes"),
    "a held-out class of its own": (lambda r: shutil.copytree(r / "val/dog", r / "val/elk"), "elk"),
    "no held-out images": (lambda r: (r / "val").rename(r / "valid"), "val"),
    "no folder": (lambda r: r.rename("elsewhere"), "there is no folder images/train"),
    "no class folder": (
        lambda r: shutil.rmtree(r / "train") or (r / "train").mkdir(),
        "each class",
    ),
    "a link to no class": (
        lambda r: (r / "train/elk").symlink_to("/no/elk"),
        "train/elk is a link",
    ),
    "a link to no test set": (
        lambda r: (r / "test").mkdir() or (r / "test/cat").symlink_to("x"),
        "test/cat is a link",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_folder_that_is_no_data_set_is_refused_in_one_line(images: Path, kind: str):
    change, part = REFUSED[kind]
    change(images)
    result = train(*FOLDER)
    assert result.status == 2 and len(result.lines) == 1, result.err
    assert "dataset.root=" in result.err
    assert part in result.err
    assert not Path("outputs").exists()


def test_classes_without_a_held_out_image_are_named(images: Path):
    shutil.rmtree(images / "val" / "dog")
    result = train(*FOLDER)
    assert result.status == 0, result.err
    assert result.lines == ["warning: 1 of 2 classes have no held-out image: dog"]


@pytest.mark.parametrize("memory", [0, 2**30])
def test_broken_image_is_named_and_ends_the_run(
    images: Path, monkeypatch: pytest.MonkeyPatch, memory: int
):
    monkeypatch.setattr(halves, "MOST_MEMORY", memory)
    for name in ("train/cat/2.png", "train/dog/1.png"):
        (images / name).write_bytes(b"none")
    result = train(*FOLDER, "name=run", "dataset.workers=1")
    assert result.status in (1, 2)
    assert "no readable image" in result.lines[-1]
    if memory:
        assert "train/cat/2.png" in result.err
        assert "2 of 6 images" in result.err
    else:
        assert any(name in result.lines[-1] for name in ("train/cat/2.png", "train/dog/1.png"))


# CIFAR


@pytest.mark.parametrize(("name", "kind"), [("cifar10", CIFAR10), ("cifar100", CIFAR100)])
def test_cifar_is_unpacked_on_first_use_and_mended(
    here: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: Any
):
    write_cifar(here / "data", kind, monkeypatch)
    words = [f"dataset={name}", "dataset.root=data", *TINY, "recipe.batch_size=100"]
    result = train(*words, "name=run")
    assert result.status == 0, result.err
    train_images, held_out = (kind("data", train=x) for x in (True, False))
    counts = f"{len(train_images)} images of {name}, {len(held_out)}"
    assert counts.replace(", ", f", {len(held_out)} classes, ") in result.out
    batch = here / "data" / kind.base_folder / kind.test_list[0][0]
    batch.write_bytes(batch.read_bytes()[:99])  # is unpacked again
    result = evaluate("run=outputs/run", "predictions=x.csv")
    assert result.status == 0, result.err
    with open("x.csv", newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [row["class"] for row in rows] == [held_out.classes[i] for i in held_out.targets]
    model, transform, _ = load_run("outputs/run")
    with torch.no_grad():
        probabilities = model(transform([image for image, _ in held_out])).softmax(1).max(1).values
    found = [float(row["probability"]) for row in rows]
    assert found == pytest.approx(probabilities.tolist(), abs=1e-5)


def test_failed_download_states_which_file_to_put_where(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    write_cifar(here / "data", CIFAR10, monkeypatch).write_bytes(b"half a download")
    result = train("dataset=cifar10", "dataset.root=data", *TINY)
    assert result.status == 2
    assert len(result.lines) == 1
    parts = ("dataset.root=data", CIFAR10.url, CIFAR10.tgz_md5, str(here / "data"))
    assert all(part in result.err for part in parts)
