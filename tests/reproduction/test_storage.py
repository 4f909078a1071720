"""Atomic file replacement, kept versions, and checksums that detect damage."""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reproduction.models.weights import read_file
from reproduction.system.errors import UserError
from reproduction.system.storage import (
    clear_leftovers,
    replacing,
    verify,
    versions,
    write_text,
)
from reproduction.training.checkpoint import save_last, save_plain

STATE = {"module": {"a": torch.arange(3.0)}, "step": 7}


def write_state(path: Path) -> None:
    save_last(path, STATE)


def write_plain(path: Path) -> None:
    save_plain(path, STATE["module"], ["cat", '"tokenmixup.sha256":"'])


WRITERS = pytest.mark.parametrize("write", [write_state, write_plain])


@contextmanager
def full_disk(free: int) -> Iterator[None]:
    """Limits the size of files to `free` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_replacing_keeps_the_old_file_after_an_error(tmp_path: Path):
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_are_synced_before_they_replace_others(tmp_path: Path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append((tmp_path / "file").exists()))
    write_text(tmp_path / "file", "new")
    assert synced == [False, True]  # the file, then its folder


@WRITERS
def test_full_disk_keeps_the_old_file(tmp_path: Path, write):
    path = tmp_path / "file"
    write(path)
    before = path.read_bytes()
    with full_disk(100), pytest.raises(Exception, match=r"File too large|Errno 27"):
        write(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_without_sync_is_used(tmp_path: Path, monkeypatch, number: int):
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(number, "no sync")))
    write_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"


def test_failing_sync_keeps_the_versions(tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    for text in ("first", "second"):
        with replacing(path, keep=2) as temporary:
            temporary.write_text(text)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(OSError, match="no space"), replacing(path, keep=2) as temporary:
        temporary.write_text("third")
    assert [version.read_text() for version in versions(path)] == ["second", "first"]
    assert len(list(tmp_path.iterdir())) == 2


def test_replacing_keeps_the_newest_versions(tmp_path: Path):
    path = tmp_path / "last.pt"
    assert versions(path) == []
    write_text(tmp_path / "last-x.pt", "the user's")
    for number, keep in enumerate((3, 3, 3, 3, 12, 2, 1)):
        with replacing(path, keep) as temporary:
            temporary.write_text(str(number))
        expected = [str(n) for n in range(number, -1, -1)][: min(keep, 4)]
        assert [version.read_text() for version in versions(path)] == expected
    assert {entry.name for entry in tmp_path.iterdir()} == {"last.pt", "last-x.pt"}


def test_replacing_keeps_files_of_similar_names(tmp_path: Path):
    for name in ("weights-1.txt", "weights.txt"):
        write_text(tmp_path / name, name)
    write_text(tmp_path / "weights.txt", "new")
    assert (tmp_path / "weights-1.txt").read_text() == "weights-1.txt"


def test_versions_are_ordered_from_newest_to_oldest(tmp_path: Path):
    path = tmp_path / "last.pt"
    for number in (10, 9, 2):
        write_text(tmp_path / f"last-{number}.pt", "")
    names = ["last.pt", "last-2.pt", "last-9.pt", "last-10.pt"]
    assert [version.name for version in versions(path)] == names


def test_clear_leftovers_removes_only_temporary_files(tmp_path: Path):
    for name in (".last.pt.1234abcd.tmp", ".lock", "last.pt", "x.tmp"):
        write_text(tmp_path / name, "")
    clear_leftovers(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {".lock", "last.pt", "x.tmp"}


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return one == other


def test_files_are_readable_by_other_programs(tmp_path: Path):
    write_state(tmp_path / "last.pt")
    write_plain(tmp_path / "best.safetensors")
    assert verify(tmp_path / "best.safetensors")
    assert same(torch.load(tmp_path / "last.pt", weights_only=True), STATE)
    assert same(load_file(tmp_path / "best.safetensors"), STATE["module"])


def test_equal_weights_are_written_as_equal_bytes(tmp_path: Path):
    for number in range(9):
        write_plain(tmp_path / f"{number}.safetensors")
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


@WRITERS
def test_flipped_bits_are_detected_or_harmless(tmp_path: Path, write: Callable):
    path = tmp_path / "file"
    write(path)
    original, content = path.read_bytes(), read_file("checkpoint", path)
    refused, places = 0, {*range(0, len(original), 11), *range(len(original) - 100, len(original))}
    for place in places:
        flipped = bytearray(original)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            read = read_file("checkpoint", path)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
        else:  # the flipped bit is in a date or a padding, or in the marker of the digest
            assert same(read, content)
    assert refused > 0.5 * len(places)


@WRITERS
def test_files_truncated_anywhere_are_refused(tmp_path: Path, write: Callable):
    path = tmp_path / "file"
    write(path)
    original = path.read_bytes()
    for size in range(0, len(original), 13):
        path.write_bytes(original[:size])
        with pytest.raises(UserError, match=r"^checkpoint: not readable: [^\n]+$"):
            read_file("checkpoint", path)


@WRITERS
def test_read_file_refuses_bytes_that_differ_from_the_checksum(tmp_path: Path, write: Callable):
    path = tmp_path / "file"
    write(path)
    value = STATE["module"]["a"].numpy().tobytes()
    assert path.read_bytes().count(value) == 1
    path.write_bytes(path.read_bytes().replace(value, value[::-1]))
    with pytest.raises(UserError, match="not readable: ValueError: damaged, "):
        read_file("checkpoint", path)
