"""Atomic file replacement, checkpoint rotation, and the digest of safetensors files.

The digest detects damage, as the checksums of a zip archive do for torch.save. It covers all other
bytes of the file and is stored in its metadata, so that standard tools can still read it. Files of
other projects have none.
"""

import errno
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count, takewhile
from mmap import ACCESS_READ, mmap
from pathlib import Path
from uuid import uuid4

TEMPORARIES = ".*.tmp"
SYNC_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # from some network file systems


@contextmanager
def replacing(path: Path, keep: int | None = None) -> Iterator[Path]:
    """Yields a temporary path in the same folder, which then replaces `path` atomically.

    The new file is flushed to disk first. An error removes it and leaves `path` untouched. With
    `keep`, the newest `keep` versions of `path` are kept, see `versions`.
    """
    temporary = temporary_name(path)
    try:
        yield temporary
        sync(temporary)
        if keep is not None:
            _rotate(path, keep)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def temporary_name(path: Path) -> Path:
    """Returns a new name beside `path`, which matches TEMPORARIES."""
    return path.with_name(f".{path.name}.{uuid4().hex[:8]}.tmp")


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def versions(path: Path) -> list[Path]:
    """Returns `path` and the versions it replaced, newest first: last.pt, last-1.pt, last-2.pt.

    Includes `path` if only older versions exist, which a kill during rotation can cause.
    """
    name = re.compile(rf"{re.escape(path.stem)}-([1-9]\d*){re.escape(path.suffix)}")
    matches = ((name.fullmatch(entry.name), entry) for entry in path.parent.glob(f"{path.stem}-*"))
    older = sorted((int(match[1]), entry) for match, entry in matches if match)
    return [path, *(entry for _, entry in older)] if older or path.exists() else []


def clear_leftovers(folder: Path) -> None:
    """Removes temporary files left by killed processes."""
    for temporary in folder.glob(TEMPORARIES):
        temporary.unlink(missing_ok=True)


def _rotate(path: Path, keep: int) -> None:
    """Renames each version to the next number and removes surplus versions."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in count(1))
    existing = [*takewhile(Path.exists, chain([path], numbered))]  # spares copies after a gap
    for surplus in existing[keep:]:
        surplus.unlink()
    for newer, number in reversed([*zip(existing, range(1, keep), strict=False)]):
        os.replace(newer, path.with_stem(f"{path.stem}-{number}"))


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in SYNC_UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


DIGEST_KEY = "tokenmixup.sha256"
WRITER = {
    "written_by": "tokenmixup"
}  # marks a file with a digest even if DIGEST_KEY itself is damaged
BLANK = "0" * 64  # placeholder for the hexadecimal digest
BEFORE = f'"{DIGEST_KEY}":"'.encode()  # as in JSON


def write_digest(path: Path) -> None:
    """Replaces the blank digest of the file."""
    result = _digest(path)
    assert result is not None, "the file has no placeholder for a digest"
    offset, _, digest = result
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(digest)


def verify(path: Path) -> bool:
    """Whether the file has a digest. Raises ValueError if the digest does not match."""
    if not path.stat().st_size or (result := _digest(path)) is None:
        return False
    _, stored, digest = result
    if stored != digest:
        raise ValueError("damaged, its bytes do not match its digest")
    return True


def _digest(path: Path) -> tuple[int, bytes, bytes] | None:
    """Returns (offset of the digest, stored digest, digest of all other bytes), None if missing."""
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        offset = content.rfind(BEFORE) + len(BEFORE)
        if offset < len(BEFORE):
            return None
        end = offset + len(BLANK)
        with memoryview(content) as view, view[:offset] as head, view[end:] as tail:
            digest = hashlib.sha256(head)
            digest.update(tail)
        return offset, content[offset:end], digest.hexdigest().encode()
