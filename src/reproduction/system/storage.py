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
from itertools import chain, count, takewhile
from mmap import ACCESS_READ, mmap
from pathlib import Path
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
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in count(1))
    there = [*takewhile(Path.exists, chain([path], numbered))]  # a user's copy has a gap before it
    for surplus in there[keep:]:
        surplus.unlink()
    for newer, number in reversed([*zip(there, range(1, keep), strict=False)]):
        os.replace(newer, path.with_stem(f"{path.stem}-{number}"))


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


def seal_archive(path: Path) -> None:
    """Adds the digest to a zip archive."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = BEFORE + BLANK.encode() + AFTER
    fill_in(path)


def fill_in(path: Path) -> None:
    """Writes the digest where the file has a blank one."""
    found = _digest(path)
    assert found is not None, "the file has no place for a digest"
    place, _, digest = found
    with path.open("r+b") as file:
        file.seek(place)
        file.write(digest)


def verify(path: Path) -> bool:
    """Whether the file has a digest; ValueError if it is one of other bytes."""
    if not path.stat().st_size or (found := _digest(path)) is None:
        return False
    _, written, digest = found
    if written != digest:
        raise ValueError("damaged, these are not the bytes that were written")
    return True


def _digest(path: Path) -> tuple[int, bytes, bytes] | None:
    """Where the digits begin, what is there, and the digits over what is before and after them."""
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        place = content.rfind(BEFORE) + len(BEFORE)
        if place < len(BEFORE):
            return None
        end = place + len(BLANK)
        with memoryview(content) as view, view[:place] as head, view[end:] as tail:
            digest = hashlib.sha256(head)
            digest.update(tail)
        return place, content[place:end], digest.hexdigest().encode()
