"""Image folders in any state are read correctly or refused in one line, and nothing hangs."""

import io
import os
import signal
import struct
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from PIL import Image

from reproduction.config import Config
from reproduction.data.build import build_evaluation_loader, build_training_loader
from reproduction.data.custom import _rgb
from reproduction.data.folders import missing_data
from reproduction.data.images import cache_in_memory, load_image
from reproduction.data.loaders import TrainingBatches
from reproduction.data.sources import folders
from reproduction.system.errors import UserError
from tests.reproduction.conftest import config_of, load_source, write_images

NOISE = np.random.default_rng(0).integers(0, 256, (40, 32, 4), dtype=np.uint8)
RGB = Image.fromarray(NOISE[..., :3])
PATIENCE = 20  # seconds


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """Fails a test after PATIENCE seconds."""

    def give_up(signum: int, frame: FrameType | None) -> None:
        raise AssertionError("hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def encoded(image: Image.Image, kind: str, **settings: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """Returns a PNG that states its size but holds no pixels."""
    return png(struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"\0")


def png(header: bytes, rows: bytes) -> bytes:
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def deep_png(colour: int) -> bytes:
    """Returns a PNG of 16 bits a channel; the colour type 2 is RGB, 4 grey and alpha, 6 RGBA."""
    row = bytes(1 + 32 * 2 * {2: 3, 4: 2, 6: 4}[colour])
    return png(struct.pack(">IIBBBBB", 32, 40, 16, colour, 0, 0, 0), row * 40)


def deep_tiff(planes: int) -> bytes:
    """Returns an RGB TIFF of 16 bits a channel, by pixels (1) or planes (2)."""
    tags = {256: 32, 257: 40, 258: 16, 259: 1, 262: 2, 273: 200, 277: 3, 278: 40, 284: planes}
    entries = b"".join(struct.pack("<HHLL", tag, 4, 1, value) for tag, value in tags.items())
    head = b"II*\0" + struct.pack("<LH", 8, len(tags)) + entries + bytes(4)
    return head.ljust(200, b"\0") + bytes(32 * 40 * 6)


def bmp_of_16_bits() -> bytes:
    """Returns a BMP whose channels share 16 bits, 5 or 6 for each."""
    head = struct.pack("<LLLLLLHHLLLLLL", 2614, 0, 54, 40, 32, 40, 1, 16, 0, 2560, 0, 0, 0, 0)
    return b"BM" + head + bytes(2560)


PAGES = [RGB.convert("P"), RGB.rotate(90).convert("P")]
ORIENTATION = 0x0112  # EXIF's tag
# orientation -> upright pixels of the stored ones, by the standard's definition of row and column 0
UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a[::-1].swapaxes(0, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a.swapaxes(0, 1)[::-1],
}


def rotated(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


# EXIF whose first tag, a width that is a text, Pillow can read but not write
ODD_EXIF = b"Exif\0\0II*\0" + struct.pack("<LH", 8, 2)
ODD_EXIF += struct.pack("<HHLL", 0x100, 2, 3, 0x414141)
ODD_EXIF += struct.pack("<HHLLL", ORIENTATION, 3, 1, 6, 0)
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"

# name -> content of train/cat/x.png, part of its error line or None for an image
CONTENTS: dict[str, tuple[bytes, str | None]] = {
    "1-bit": (encoded(RGB.convert("1"), "PNG"), None),
    "grey and alpha": (encoded(RGB.convert("LA"), "PNG"), None),
    "palette with transparency": (encoded(PAGES[0], "PNG", transparency=3), None),
    "palette with many": (encoded(PAGES[0], "PNG", transparency=bytes(range(256))), None),
    "RGBA": (encoded(Image.fromarray(NOISE), "PNG"), None),
    "EXIF that is none": (encoded(RGB, "PNG", exif=b"Exif\0\0 none"), None),
    "EXIF that ends early": (encoded(RGB, "WEBP", exif=b"Exif\0\0II*\0"), None),
    "BMP of 16 bits a pixel": (bmp_of_16_bits(), None),
    "CMYK": (encoded(RGB.convert("CMYK"), "JPEG"), None),
    "rotated by EXIF": (encoded(RGB, "JPEG", exif=rotated(6)), None),
    "animated": (encoded(PAGES[0], "GIF", save_all=True, append_images=PAGES[1:]), None),
    "many pages": (encoded(RGB, "TIFF", save_all=True, append_images=PAGES), None),
    "several photos": (encoded(RGB, "MPO", save_all=True, append_images=[RGB]), None),
    "16 bits": (encoded(Image.fromarray(NOISE[..., 0].astype(np.uint16)), "PNG"), "8 bits"),
    "32 bits": (encoded(Image.fromarray(NOISE[..., 0].astype(np.int32)), "TIFF"), "8 bits"),
    "floats": (encoded(Image.fromarray(NOISE[..., 0].astype(np.float32)), "TIFF"), "8 bits"),
    "16 bits, RGB": (
        deep_png(2),
        "RGB pixels of more than 8 bits, convert them to 8 bits a channel",
    ),
    "16 bits, grey and alpha": (deep_png(4), "of more than 8 bits"),
    "16 bits, RGBA": (deep_png(6), "of more than 8 bits"),
    "16 bits, TIFF": (deep_tiff(1), "of more than 8 bits"),
    "16 bits, planes of a TIFF": (deep_tiff(2), "of more than 8 bits"),
    "16 bits, PPM": (b"P6 32 40 65535\n" + bytes(32 * 40 * 6), "of more than 8 bits"),
    "12 bits, PPM as text": (b"P3 32 40 4095\n" + b"7 " * 3840, "of more than 8 bits"),
    "no bytes": (b"", "cannot identify"),
    "text": (b"this is no image\n", "cannot identify"),
    "a page": (b"<html><body>404</body></html>", "cannot identify"),
    "a program for a printer": (EPS, "cannot identify"),
    "a truncated PNG": (encoded(RGB, "PNG")[:900], "truncated"),
    "a truncated JPEG": (encoded(RGB, "JPEG")[:700], "truncated"),
    "a JPEG's header": (encoded(RGB, "JPEG")[:30], "no readable image"),
    "60,000 x 60,000": (png_header(60_000, 60_000), "decompression bomb"),
    "the largest PNG": (png_header(2**31 - 1, 2**31 - 1), "decompression bomb"),
    "one row of a billion": (png_header(10**9, 1), "decompression bomb"),
    "no rows": (png_header(8, 0), "no readable image"),
    "one row": (encoded(Image.new("RGB", (60_000, 1)), "PNG"), "60,000 x 1 pixels, the longer"),
}


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def _folder(name: str) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        for split in ("train", "val"):
            (root / split / "cat").rename(root / split / name)

    return make


def _deep(root: Path) -> None:
    deep = root / "train" / "cat" / "/".join("abcdefgh" * 20)
    deep.mkdir(parents=True)
    (root / "train" / "cat" / "x.png").rename(deep / "x.png")


def _name(name: bytes) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        here = root / "train" / "cat"
        os.rename(here / "x.png", os.path.join(os.fsencode(here), name))

    return make


def _broken_name(root: Path) -> None:
    name = os.path.join(os.fsencode(root / "train" / "cat"), b"two\nlines \xff.png")
    (root / "train" / "cat" / "x.png").rename(os.fsdecode(name))
    Path(os.fsdecode(name)).write_bytes(b"")


def _x(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Replaces train/cat/x.png by something else."""

    def change(root: Path) -> None:
        (root / "train" / "cat" / "x.png").unlink()
        make(root / "train" / "cat" / "x.png")

    return change


def _emptied(folder: str) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        for path in (root / folder).iterdir():
            path.unlink()

    return make


def _one_class(root: Path) -> None:
    for split in ("train", "val"):
        (root / split / "dog").rename(root / f"{split}-dog")


# name -> change of the folder, part of its error line or None if it is read
FOLDERS: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "nothing": (lambda root: None, None),
    "a class without images": (_emptied("train/cat"), "cat holds no images"),
    "a held-out class without images": (_emptied("val/dog"), "dog holds no images"),
    "one class": (_one_class, "needs two classes or more, train/ holds 'cat' alone"),
    "a class on one side": (lambda r: (r / "val" / "dog").rename(r / "val" / "elk"), "'dog'"),
    "no classes": (lambda r: (r / "val").rename(r / "valid"), "train/<class>/"),
    "a file for the folder": (lambda r: (r / "val").rename(r / "x") and (r / "val").touch(), "val"),
    "a file among the classes": (lambda r: (r / "train" / "notes.txt").touch(), None),
    "an image among the classes": (lambda r: RGB.save(r / "train" / "x.png"), None),
    "another file in a class": (lambda r: (r / "train" / "cat" / "notes.txt").touch(), None),
    "nested folders": (_deep, None),
    "a folder named like an image": (lambda r: (r / "train" / "cat" / "y.png").mkdir(), None),
    "a pipe": (_x(os.mkfifo), "x.png: no readable image: there is no such file"),
    "a link that leads nowhere": (_x(_link("gone.png")), "x.png: no readable image"),
    "a link to itself": (_x(_link("x.png")), "x.png: no readable image"),
    "a link to a device": (_x(_link("/dev/zero")), "x.png: no readable image"),
    "a link to a folder above": (_x(_link("..")), "x.png/cat leads to a folder"),
    "a link to an image": (_x(_link("../dog/0.png")), None),
    "links to each other": (
        lambda r: (_link("b")(r / "train" / "a"), _link("a")(r / "train" / "b")),
        "train/a is a link that leads nowhere",
    ),
    "a class on a store that is gone": (
        lambda r: [_link("/gone/elk")(r / split / "elk") for split in ("train", "val")],
        "train/elk is a link that leads nowhere",
    ),
    "a part of a class on a store that is gone": (
        lambda r: _link("/gone/more")(r / "train" / "cat" / "more"),
        "cat/more is a link that leads nowhere",
    ),
    "a linked class": (
        lambda r: ((r / "train" / "cat").rename(r / "cat"), _link("../cat")(r / "train" / "cat")),
        None,
    ),
    "a folder twice in a class": (
        lambda r: (_link("../dog")(r / "train" / "cat" / "a"), _link("a")(r / "train/cat/b")),
        "leads to a folder that this one already contains",
    ),
    "a name of two lines": (_name(b"two\nlines.png"), None),
    "a name of other bytes": (_name(b"\xff\xfe.png"), None),
    "an emoji": (_name("\N{GRINNING FACE}.png".encode()), None),
    "a hidden image": (_name(b".x.png"), None),
    "spaces": (_name(b"  x y .png"), None),
    "a long name": (_name(b"x" * 251 + b".png"), None),
    "a broken file of an odd name": (_broken_name, r"two\nlines \udcff.png': no readable"),
    "a class of two lines": (_folder("two\nlines"), None),
    "a class with an emoji": (_folder("\N{GRINNING FACE}"), None),
    "a hidden class": (_folder(".cat"), "needs two classes or more, train/ holds 'dog' alone"),
    "a class with spaces": (_folder(" cat "), None),
    "a class of other bytes": (_folder(os.fsdecode(b"\xff")), r"UTF-8, '\udcff' is not"),
}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    root = write_images(tmp_path / "images", ["cat", "dog"], train=2, held_out=1, size=16)
    (root / "train" / "cat" / "1.png").rename(root / "train" / "cat" / "x.png")
    return root


def tree(root: Path) -> list[tuple[str, object]]:
    """Returns all paths with their type, size and modification time."""
    return sorted(
        (str(path), path.lstat().st_mode, path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in [root, *root.rglob("*")]
    )


@cache
def base() -> Config:
    return config_of()


def read(root: Path, memory: int = 0) -> None:
    """Loads all images like a run."""
    if problem := missing_data("image_folder", str(root)):
        raise UserError(problem)
    dataset = replace(base().dataset, name="image_folder", root=str(root), memory_mib=memory)
    config = replace(base(), dataset=dataset)
    source = load_source("image_folder", str(root), None)
    batches = TrainingBatches(len(source.train), 2, 0)
    assert len(list(build_training_loader(config, source, batches, False))) >= 1
    assert len(list(build_evaluation_loader(config, source.held_out, 0, 1, False))) >= 1


def check(root: Path, message: str | None) -> None:
    """Asserts that a folder is read, or refused in one line, with and without images in memory."""
    before = tree(root)
    for memory in (0, 64):
        if message is None:
            read(root, memory)
            continue
        with pytest.raises((UserError, RuntimeError)) as refusal:
            read(root, memory)
        assert message in str(refusal.value) and len(str(refusal.value).splitlines()) == 1
    assert tree(root) == before


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("kind", CONTENTS)
def test_load_image_reads_or_names_files_of_any_content(images: Path, kind: str):
    content, message = CONTENTS[kind]
    path = images / "train" / "cat" / "x.png"
    path.write_bytes(content)
    if message is None:
        for as_seen in (False, True):
            image = load_image(str(path), as_seen)
            turned = as_seen and kind == "rotated by EXIF"
            assert image.mode == "RGB" and image.size == ((40, 32) if turned else (32, 40))
        return
    check(images, message)
    with pytest.raises(RuntimeError, match=f"{path}: no readable image: "):
        load_image(str(path))


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_of_any_shape_are_read_or_refused(images: Path, kind: str):
    change, message = FOLDERS[kind]
    change(images)
    check(images, message)


def test_transparent_pixels_are_white_but_for_imagenet(images: Path):
    """Where a picture is opaque, nothing changes; hidden colours do not show."""
    path = images / "train" / "cat" / "x.png"
    rgba = NOISE.copy()
    rgba[..., 3] = np.where(NOISE[..., 3] < 128, 0, 255)
    shown = np.where(rgba[..., 3:] == 0, 255, rgba[..., :3])
    source = load_source("image_folder", str(images), None)
    grey = Image.fromarray(rgba[..., [0, 3]])  # LA
    for picture, pixels in ((Image.fromarray(rgba), shown), (grey, shown[..., [0, 0, 0]])):
        path.write_bytes(encoded(picture, "PNG"))
        assert np.array_equal(source.train[1][0], pixels)
        assert np.array_equal(_rgb(picture), pixels)  # of own data
        published = folders("imagenet1k", str(images)).train[1][0]
        assert np.array_equal(published, picture.convert("RGB"))
    for transparency in (PAGES[0].getpixel((9, 9)), bytes(range(256))):
        path.write_bytes(encoded(PAGES[0], "PNG", transparency=transparency))
        with Image.open(path) as picture:
            stored, alpha = np.split(np.array(picture.convert("RGBA"), float), [3], axis=2)
        expected = 255 + (stored - 255) * alpha / 255
        assert np.abs(source.train[1][0] - expected).max() < 1 and alpha.min() == 0
    path.write_bytes(encoded(Image.fromarray(rgba), "PNG", exif=rotated(6)))
    assert np.array_equal(source.train[1][0], UPRIGHT[6](shown))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_image_folder_shows_images_upright(images: Path, kind: str, orientation: int):
    path = images / "train" / "cat" / "x.png"
    path.write_bytes(encoded(RGB, kind, exif=rotated(orientation)))
    stored = np.array(load_image(str(path)))
    source = load_source("image_folder", str(images), None)
    for train in (source.train, cache_in_memory(source.train, 1, threads=1)):
        image = train[1][0]
        assert np.array_equal(image, UPRIGHT[orientation](stored))
        assert image.size == ((32, 40) if orientation < 5 else (40, 32))
    published = folders("imagenet1k", str(images))  # as the published accuracies see them
    assert np.array_equal(published.train[1][0], stored)


def test_odd_exif_hides_no_orientation(images: Path):
    path = images / "train" / "cat" / "x.png"
    path.write_bytes(encoded(RGB, "JPEG", exif=ODD_EXIF))
    assert load_image(str(path), as_seen=True).size == (40, 32)


def test_hidden_files_and_folders_of_systems_are_ignored(images: Path):
    hidden = ["train/.ipynb_checkpoints", "train/cat/.ipynb_checkpoints", "val/.git"]
    hidden += [f"train/{name}" for name in ("@eaDir", "__MACOSX", "lost+found", "$RECYCLE.BIN")]
    for name in (*hidden, "train/cat/@eaDir", "val/dog/__MACOSX"):
        (images / name).mkdir()
        RGB.save(images / name / "0-checkpoint.png")
    (images / "train" / "dog" / "._0.png").write_bytes(b"Mac OS X")
    source = load_source("image_folder", str(images), None)
    assert source.classes == ["cat", "dog"] and not source.others
    assert (len(source.train), len(source.held_out)) == (4, 2)


def test_files_are_read_by_many_endings_and_others_are_counted(images: Path):
    here = images / "train" / "cat"
    for ending, kind in (("jfif", "JPEG"), ("JPE", "JPEG"), ("gif", "GIF"), ("avif", "AVIF")):
        (here / f"y.{ending}").write_bytes(encoded(RGB, kind))
    for name in ("a.heic", "b.HEIC", "notes.txt", "README"):
        (here / name).touch()
    source = load_source("image_folder", str(images), None)
    assert len(source.train) == 2 + 2 + 4
    assert all(source.train[index][0].size == (32, 40) for index in range(2, 6))
    assert source.others == {".heic": 2, ".txt": 1, "without one": 1}


def test_pillow_warns_of_nothing(images: Path):
    content, _ = CONTENTS["palette with many"]
    (images / "train" / "cat" / "x.png").write_bytes(content)
    code = "import sys; from reproduction.data.images import load_image; load_image(sys.argv[1])"
    command = [sys.executable, "-c", code, str(images / "train" / "cat" / "x.png")]
    assert subprocess.run(command, capture_output=True, check=True).stderr == b""


@pytest.mark.parametrize("call", ["scandir", "open"])
def test_unreadable_paths_are_named(images: Path, monkeypatch: pytest.MonkeyPatch, call: str):
    """Root may read everything, so the error is simulated."""
    original = {"scandir": os.scandir, "open": Image.open}[call]
    refused = images / "train" / "cat" if call == "scandir" else images / "train" / "cat" / "x.png"

    def deny(path: object, **settings: object) -> object:
        if str(path) == str(refused):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, **settings)

    monkeypatch.setattr(os if call == "scandir" else Image, call, deny)
    check(images, f"Permission denied: '{refused}'")


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_load_image_reads_or_names_mutated_files(tmp_path: Path):
    """Bytes are changed, removed or truncated; an error always names the file in one line."""
    rng = np.random.default_rng(0)
    kinds = {"png": "PNG", "jpg": "JPEG", "tif": "TIFF", "bmp": "BMP", "webp": "WEBP", "ppm": "PPM"}
    results: Counter[str] = Counter()
    for number in range(300):
        suffix = list(kinds)[number % len(kinds)]
        content = bytearray(encoded(RGB, kinds[suffix]))
        for place in rng.choice([60, len(content)], 3):
            content[rng.integers(place)] = rng.integers(256)
        start, length = rng.integers(len(content)), rng.choice([0, 0, 1, 40])
        del content[start : start + length]
        path = tmp_path / f"{number}.{suffix}"
        path.write_bytes(content[: rng.choice([len(content), len(content), len(content) // 2])])
        try:
            assert load_image(str(path), as_seen=True).mode == "RGB"
            results[f"{suffix} read"] += 1
        except RuntimeError as error:
            assert str(error).startswith(f"{path}: no readable image: ")
            assert len(str(error).splitlines()) == 1
            results[f"{suffix} refused"] += 1
    assert len(results) >= 2 * len(kinds) - 2, results
