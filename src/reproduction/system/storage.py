"""Files that are whole: what breaks off, or a full disk, leaves the old one; digests tell damage.

A digest is inside its file, over all other bytes: safetensors keep it in their metadata, what
torch.save writes in the comment of its zip archive, so that the usual programs read both. Files of
other projects have none.
"""

import errno
import hashlib
import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, pairwise, takewhile
from pathlib import Path
from typing import IO
from uuid import uuid4

TEMPORARIES = ".*.tmp"
NO_SYNC_OF_FOLDERS = (errno.EINVAL, errno.ENOTSUP)  # what some network file systems answer


@contextmanager
def replacing(path: Path, keep: int | None = None) -> Iterator[Path]:
    """Gives a temporary name in the same folder; what is written there then becomes `path`.

    It is on the disk before it takes its place. After an error it is gone and `path` untouched.
    With `keep`, the newest so many `versions` of it stay.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        sync(temporary)
        if keep is not None:
            _make_room(path, keep)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def versions(path: Path) -> list[Path]:
    """`path` and what it has replaced, newest first: last.pt, last-1.pt, last-2.pt.

    Of an older one `path` is told as well, though a kill may have left it without a file.
    """
    name = re.compile(rf"{re.escape(path.stem)}-([1-9]\d*){re.escape(path.suffix)}")
    found = ((name.fullmatch(entry.name), entry) for entry in path.parent.glob(f"{path.stem}-*"))
    older = sorted((int(match[1]), entry) for match, entry in found if match)
    return [path, *(entry for _, entry in older)] if older or path.exists() else []


def clear_leftovers(folder: Path) -> None:
    """Removes what killed processes left under temporary names."""
    for temporary in folder.glob(TEMPORARIES):
        temporary.unlink(missing_ok=True)


def _make_room(path: Path, keep: int) -> None:
    """Moves each version one further, and removes those that are too many."""
    names = [path, *(path.with_stem(f"{path.stem}-{number}") for number in range(1, keep))]
    for newer, older in reversed(list(pairwise(names))):
        if newer.exists():
            os.replace(newer, older)
    surplus = (path.with_stem(f"{path.stem}-{number}") for number in count(keep))
    for version in takewhile(Path.exists, surplus):  # a copy of the user's own has a gap before it
        version.unlink()


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in NO_SYNC_OF_FOLDERS):
            raise
    finally:
        os.close(descriptor)


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
