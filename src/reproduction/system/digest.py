"""A digest inside a file, over all of its other bytes.

safetensors keep it in their metadata, what torch.save writes in the comment of its zip archive, so
that the usual programs read both. Files of other projects have none.
"""

import hashlib
import os
import zipfile
from pathlib import Path
from typing import IO

KEY = "tokenmixup.sha256"
WRITER = {"written_by": "tokenmixup"}  # tells of a digest too, should KEY itself be damaged
BLANK = "0" * 64  # hexadecimal digits
BEFORE, AFTER = f'"{KEY}":"'.encode(), b'"'  # as JSON has them
LONGEST_HEADER = 100_000_000  # bytes, as safetensors allow
CHUNK = 2**20  # bytes that are read at a time


def seal_archive(path: Path) -> None:
    """Adds the digest to a zip archive."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = BEFORE + BLANK.encode() + AFTER
    fill_in(path)


def fill_in(path: Path) -> None:
    """Writes the digest where the file has a blank one."""
    with path.open("r+b") as file:
        place = _place(file)
        assert place is not None, "the file has no place for a digest"
        digest = _digest(file, place)
        file.seek(place)
        file.write(digest)


def verify(path: Path) -> bool:
    """Whether the file has a digest; ValueError if it is one of other bytes."""
    with path.open("rb") as file:
        place = _place(file)
        if place is None:
            return False
        file.seek(place)
        if file.read(len(BLANK)) != _digest(file, place):
            raise ValueError("damaged, these are not the bytes that were written")
    return True


def _place(file: IO[bytes]) -> int | None:
    """Where the digits begin: in the header of safetensors, at the end of an archive."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    begin = file.read(8)
    if begin.startswith(b"PK"):
        end = size - len(AFTER) - len(BLANK)
        file.seek(max(0, end - len(BEFORE)))
        return end if file.read(len(BEFORE)) == BEFORE else None
    length = int.from_bytes(begin, "little")
    found = file.read(min(length, LONGEST_HEADER)).find(BEFORE)
    return None if found < 0 else len(begin) + found + len(BEFORE)


def _digest(file: IO[bytes], place: int) -> bytes:
    """The digits over what is before and after them."""
    digest = hashlib.sha256()
    file.seek(0)
    left = place
    while left and (chunk := file.read(min(left, CHUNK))):
        digest.update(chunk)
        left -= len(chunk)
    file.seek(place + len(BLANK))
    while chunk := file.read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest().encode()
