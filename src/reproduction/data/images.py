"""Image files, read so that a broken one is named and nothing but pixels comes of any."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image

# Of all that Pillow knows, by content whatever the name; others can start programs, as EPS does.
NO_IMAGE = "no readable image"
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


def load_image(path: str) -> Image.Image:
    """An RGB image; RuntimeError names a file that is broken or has more than 8 bits a channel."""
    with _opened(path) as image:
        return image.convert("RGB")


def image_size(path: str) -> tuple[int, int]:
    """Width and height by the header; RuntimeError as above."""
    with _opened(path) as image:
        return image.size


@contextmanager
def _opened(path: str) -> Iterator[Image.Image]:
    try:
        if not os.path.isfile(path):
            raise ValueError("there is no such file")  # a pipe would never end
        with Image.open(path, formats=FORMATS) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"{image.mode} pixels, convert them to 8 bits a channel")
            yield image
    except Exception as error:  # Pillow's readers raise any of a broken file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RuntimeError(f"{shown(path)}: {NO_IMAGE}: {reason}") from error


def shown(path: str) -> str:
    """A path as it is if a line can hold it, else with escapes: a name may hold a newline."""
    return path if path.isprintable() else ascii(path)
