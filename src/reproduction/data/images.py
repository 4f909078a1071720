"""Image sources: arrays in memory, files, and files cached in memory."""

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from mmap import mmap
from typing import Any, Protocol, Self

import numpy as np
from PIL import Image
from PIL.ExifTags import Base
from PIL.Image import Transpose
from PIL.TiffImagePlugin import BITSPERSAMPLE

from reproduction.system.progress import Progress
from reproduction.system.ranks import is_first_rank
from reproduction.system.terminal import warn

NO_IMAGE = "no readable image"
OWN = "dataset.source: image"  # is not a file
SKIPPING = "dataset.broken_images=skip leaves such files out"
# Formats that Pillow may open, detected by content. Others can start programs, such as EPS.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
UPRIGHT = {  # EXIF's orientation -> what undoes it; Pillow's exif_transpose fails on odd EXIF
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
LONGEST_SIDE = 1000  # times the other one; resizing the shorter side would take gigabytes
LEFT_OUT = -1  # class of a broken image that is skipped
MIB = 2**20
CHANNELS, BITS = 3, 8

warnings.filterwarnings("ignore", module=r"PIL\.")  # they name no file


class ImageSource(Protocol):
    """Images by index, which have names. RuntimeError names a broken one.

    `targets` need no decoding.
    """

    targets: list[int]

    def __hash__(self) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[Image.Image, int]: ...
    def name(self, index: int) -> str: ...
    def take(self, indices: list[int]) -> Self: ...


class ArrayImages:
    """Images in memory: uint8 arrays, `h w` if grey, else `h w 3`."""

    def __init__(self, images: Sequence[np.ndarray] | np.ndarray, targets: Iterable[int]):
        self.images, self.targets = images, [int(t) for t in targets]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        image = Image.fromarray(self.images[index])  # a copy, so that the array stays unchanged
        return image if image.mode == "RGB" else image.convert("RGB"), self.targets[index]

    def name(self, index: int) -> str:
        return str(index)

    def take(self, indices: list[int]) -> Self:
        return type(self)([self.images[i] for i in indices], [self.targets[i] for i in indices])


class FileImages:
    """Images that are read from their files on access, `as_seen` or as they are stored."""

    def __init__(self, samples: Iterable[tuple[str, int]], as_seen: bool = False):
        samples = [*samples]
        parts = [os.fsencode(path) for path, _ in samples]
        # In one buffer, as forked workers would copy a list of names by counting references
        self.paths, self.ends = b"".join(parts), np.cumsum([0, *map(len, parts)])
        self.targets, self.as_seen = [target for _, target in samples], as_seen

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return load_image(self.name(index), self.as_seen), self.targets[index]

    def name(self, index: int) -> str:
        start, end = self.ends[index : index + 2]
        return os.fsdecode(self.paths[start:end])

    def samples(self) -> Iterator[tuple[str, int]]:
        return zip(map(self.name, range(len(self))), self.targets, strict=True)

    def take(self, indices: list[int]) -> Self:
        return type(self)([(self.name(i), self.targets[i]) for i in indices], self.as_seen)


class SkippedFiles(FileImages):
    """Files of which a broken one is reported once and is a black pixel of class LEFT_OUT."""

    def __init__(self, samples: Iterable[tuple[str, int]], as_seen: bool = False):
        super().__init__(samples, as_seen)
        self.reported = mmap(-1, len(self))  # shared with forked workers

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        try:
            return super().__getitem__(index)
        except RuntimeError as error:
            if not self.reported[index]:
                self.reported[index] = True
                warn(f"warning: left out: {error}")
            return Image.new("RGB", (1, 1)), LEFT_OUT


def cache_in_memory(images: ImageSource, mib: int, threads: int) -> ImageSource:
    """Decodes all images of a folder if they fit into `mib`, otherwise returns `images`.

    Forked processes share the memory. RuntimeError names a broken file and how many there are.
    """
    assert isinstance(images, FileImages), "other images are in memory already"
    if not _fits(images, mib * MIB):
        return images

    def decode(index: int) -> tuple[np.ndarray, int] | RuntimeError:
        try:
            image, target = images[index]
            return np.array(image), target
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(threads) as pool:  # decoding releases the GIL
        each = pool.map(decode, range(len(images)))
        decoded = list(Progress(is_first_rank()).over(each, "decoding images", len(images)))
    if broken := [one for one in decoded if isinstance(one, RuntimeError)]:
        count = f"{len(broken):,} of {len(decoded):,} images of this folder are broken"
        raise RuntimeError(f"{broken[0]}; {count}")
    good = [one for one in decoded if not isinstance(one, RuntimeError)]
    return ArrayImages([pixels for pixels, _ in good], [target for _, target in good])


def _fits(images: FileImages, room: int) -> bool:
    """Whether the decoded images take at most `room` bytes. Stops once they do not."""
    for path, _ in images.samples():
        with suppress(RuntimeError), _open_image(path) as image:  # a broken file takes none
            room -= image.width * image.height * CHANNELS
        if room < 0:
            return False
    return True


def load_image(path: str, as_seen: bool = False) -> Image.Image:
    """Loads as RGB. RuntimeError names a file that is broken or exceeds 8 bits per channel.

    With `as_seen` as viewers show it: upright, and transparent pixels on white.
    """
    with _open_image(path) as image:
        return to_rgb(image, upright=True) if as_seen else image.convert("RGB")


def to_rgb(image: Image.Image, upright: bool) -> Image.Image:
    """Converts to RGB on white and, with `upright`, turns as the EXIF orientation says.

    Raises ValueError for more than 8 bits a channel, as far as the image still tells.
    """
    _check_depth(image)
    seen = image
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        seen = Image.alpha_composite(white, image.convert("RGBA"))
    rgb = seen.convert("RGB")
    with suppress(Exception):  # EXIF may be malformed; Pillow raises errors of any type
        turn = UPRIGHT.get(image.getexif().get(Base.Orientation, 1)) if upright else None
        rgb = rgb if turn is None else rgb.transpose(turn)
    return rgb


def _check_depth(image: Any) -> None:
    """Raises ValueError for more than 8 bits a channel. Pillow would drop them in colour."""
    decoding = [tile.args for tile in getattr(image, "tile", ())]  # empty once it is loaded
    match getattr(image, "format", None):
        case "TIFF":
            is_deep = max(image.tag_v2.get(BITSPERSAMPLE, (1,))) > BITS
        case "PNG":
            is_deep = any(mode.endswith(";16B") for mode in decoding)
        case "PPM":  # ends with the largest value if it is not 255
            is_deep = any(type(args[-1]) is int and args[-1] >= 2**BITS for args in decoding)
        case _:
            is_deep = False
    if is_deep or image.mode.startswith(("I", "F")):
        raise ValueError(
            f"{image.mode} pixels of more than 8 bits, convert them to 8 bits a channel"
        )


@contextmanager
def _open_image(path: str) -> Iterator[Image.Image]:
    try:
        if not os.path.isfile(path):
            raise ValueError("there is no such file")  # a pipe would block
        with Image.open(path, formats=FORMATS) as image:
            _check_depth(image)
            if max(image.size) > LONGEST_SIDE * min(image.size):
                size = f"{image.width:,} x {image.height:,} pixels"
                raise ValueError(
                    f"{size}, the longer side is over {LONGEST_SIDE:,} times the other"
                )
            yield image
    except Exception as error:  # Pillow raises errors of any type
        shown = path if path.isprintable() else ascii(path)  # a name may hold a newline
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RuntimeError(f"{shown}: {NO_IMAGE}: {reason}") from error
