"""Images as 8-bit RGB: read as viewers show them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from PIL import AvifImagePlugin, Image, ImageOps, TiffImagePlugin, WebPImagePlugin  # noqa: F401

from reproduction.errors import first_line

ENDINGS = (
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".png",
    ".gif",
    ".webp",
    ".avif",
    ".ppm",
    ".bmp",
    ".pgm",
    ".tif",
    ".tiff",
)
HIDDEN = (".", "@eaDir", "__MACOSX")  # how names of no images begin
# Formats that Pillow may open, detected by content. Others can start programs, such as EPS. Those
# that it does not know at first are imported above: it would import all that it has.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


class NoImage(ValueError):
    """Content that is no image, or has more than 8 bits a channel."""

    def __init__(self, reason: str):
        super().__init__(f"no readable image: {reason}")


def read(path: str, as_seen: bool = True) -> Image.Image:
    """Reads a file as viewers show it, upright and on white, else as it is stored.

    Raises NoImage for its content, and OSError if the system cannot read it.
    """
    with _decoding(), Image.open(path, formats=FORMATS) as image:
        _check_depth(image)
        if as_seen:
            return rgb(upright(image))
        return image.convert("RGB")


def rgb(image: Any) -> Image.Image:
    """Converts a PIL image, or a uint8 array `h w` or `h w 3`; transparent pixels become white.

    Raises NoImage for anything else.
    """
    with _decoding():
        if isinstance(image, np.ndarray):
            image = Image.fromarray(image)
        if not isinstance(image, Image.Image):
            raise NoImage(f"{type(image).__name__} instead of a PIL image or an array")
        _check_depth(image)
        if image.has_transparency_data:
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image.convert("RGBA"))
        return image.convert("RGB")


@contextmanager
def _decoding() -> Iterator[None]:
    """Raises NoImage for any error of Pillow but a lack of memory and the system's own."""
    try:
        yield
    except (NoImage, MemoryError):
        raise
    except Exception as error:  # Pillow raises errors of any type
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise NoImage(first_line(error)) from error


def upright(image: Image.Image) -> Image.Image:
    """Turns an image as its EXIF orientation says."""
    with suppress(Exception):  # EXIF may be malformed
        return ImageOps.exif_transpose(image)
    return image


def _check_depth(image: Image.Image) -> None:
    """Raises NoImage for more than 8 bits a channel, which Pillow would drop in colour."""
    layout = [str(tile.args) for tile in getattr(image, "tile", ())]  # empty once it is loaded
    if image.mode.startswith(("I", "F")) or any(";16" in x for x in layout):
        raise NoImage(f"{image.mode} pixels of more than 8 bits, convert them to 8 bits")


def is_hidden(path: str) -> bool:
    """Whether an editor or a system hides a part of this path."""
    return any(part.startswith(HIDDEN) for part in path.split(os.sep))
