"""CIFAR's published archives: fetched, checked and unpacked, whole or not at all."""

import fcntl
import os
import shutil
import socket
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchvision.datasets.utils import check_integrity, download_url

SILENCE = 60  # seconds after which a server that sends nothing is given up
Digests = dict[str, str]  # file -> MD5


def is_whole(folder: Path, digests: Digests) -> bool:
    """Whether the folder holds these files."""
    return all(check_integrity(folder / file, digest) for file, digest in digests.items())


def fetch(archive: Path, md5: str, url: str, folder: Path, digests: Digests) -> None:
    """Unpacks the archive's files into `folder`, after a download unless it is there and whole.

    A download or an unpacking that was cut off is started again. One process does it, others wait
    and find it done. OSError, RuntimeError, TarError or KeyError if it cannot be had.
    """
    archive.parent.mkdir(parents=True, exist_ok=True)
    with _alone(archive.with_name(f".{archive.name}.lock")):
        if is_whole(folder, digests):
            return
        if not check_integrity(archive, md5):
            part = archive.with_name(f".{archive.name}.part")
            with _patience():
                download_url(url, str(part.parent), part.name, md5)
            os.replace(part, archive)
        _unpack(archive, folder, list(digests))
        if not is_whole(folder, digests):
            raise RuntimeError(f"{archive}: holds other files than it should")


def _unpack(archive: Path, folder: Path, files: list[str]) -> None:
    """Takes these files alone, by names of our own: no other path, link or device is followed."""
    folder.mkdir(exist_ok=True)
    with tarfile.open(archive) as tar:
        for file in files:
            member = tar.getmember(f"{folder.name}/{file}")
            content = tar.extractfile(member) if member.isreg() else None
            if content is None:
                raise RuntimeError(f"{archive}: {file} is no file in it")
            part = folder / f".{file}.part"
            with part.open("wb") as target:
                shutil.copyfileobj(content, target)
            os.replace(part, folder / file)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Waits until no other process is in here; the system frees the lock of one that is killed."""
    with lock.open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _patience() -> Iterator[None]:
    """Gives a connection up once it is silent for too long; torchvision would wait for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
