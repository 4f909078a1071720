"""CIFAR is downloaded on first use, and a file that does not match its MD5 is replaced."""

import hashlib
import multiprocessing
import os
import pickle
import tarfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import pytest
from torchvision.datasets import CIFAR10, CIFAR100

from reproduction.data import sources
from reproduction.data.images import ArrayImages
from reproduction.data.sources import Source, _open
from reproduction.system.errors import UserError
from tests.reproduction.conftest import load_source


class Server(NamedTuple):
    """A served folder, its address, and the requested paths."""

    folder: Path
    address: str
    requests: list[str]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Serves a folder over HTTP; sends only half of a file if `FILE.half` exists."""
    folder = tmp_path / "server"
    folder.mkdir()
    requests: list[str] = []
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, format: str, *args: Any) -> None:
            """Logs nothing."""

        def do_GET(self) -> None:
            requests.append(self.path)
            super().do_GET()

        def copyfile(self, source: Any, outputfile: Any) -> None:
            content = source.read()
            is_half = Path(folder, f"{self.path[1:]}.half").exists()
            outputfile.write(content[: len(content) // 2] if is_half else content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as http:
        Thread(target=http.serve_forever, args=[0.01], daemon=True).start()
        yield Server(folder, f"http://127.0.0.1:{http.server_port}", requests)
        http.shutdown()


def read(root: Path | str, name: str = "cifar10") -> Source:
    """Reads the data set, without the cache."""
    _open.cache_clear()
    return load_source(name, str(root), None)


def pixels(images: Any) -> np.ndarray:
    assert isinstance(images, ArrayImages)
    return np.asarray(images.images)


def digest(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def write_cifar(server: Server, kind: type[CIFAR10], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Serves an archive of the real layout with 4 images per file, and patches its digests."""
    rng = np.random.default_rng(0)
    content = server.folder / kind.base_folder
    content.mkdir(parents=True)
    label = "fine_labels" if kind is CIFAR100 else "labels"
    names = [name for name, _ in (*kind.train_list, *kind.test_list)]
    for name in names:
        data = rng.integers(0, 256, (4, 3072)).astype(np.uint8)
        (content / name).write_bytes(pickle.dumps({"data": data, label: [0, 1, 2, 3]}))
    classes = {kind.meta["key"]: [f"class {i}" for i in range(100 if kind is CIFAR100 else 10)]}
    (content / kind.meta["filename"]).write_bytes(pickle.dumps(classes))
    archive = server.folder / kind.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(content, kind.base_folder)
    for listing in ("train_list", "test_list"):
        entries = [[name, digest(content / name)] for name, _ in getattr(kind, listing)]
        monkeypatch.setattr(kind, listing, entries)
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": digest(content / kind.meta["filename"])})
    monkeypatch.setattr(kind, "url", f"{server.address}/{kind.filename}")
    monkeypatch.setattr(kind, "tgz_md5", digest(archive))
    return archive


@pytest.mark.parametrize(("name", "kind"), [("cifar10", CIFAR10), ("cifar100", CIFAR100)])
def test_cifar_is_downloaded_on_first_use_and_checked(server, tmp_path, monkeypatch, name, kind):
    write_cifar(server, kind, monkeypatch)
    root = tmp_path / "data"
    root.mkdir()
    (root / kind.filename).write_bytes(b"half a download")
    source = read(root, name)
    theirs = kind(str(root))
    assert np.array_equal(pixels(source.train), theirs.data)
    assert source.train.targets == theirs.targets
    assert np.array_equal(pixels(source.held_out), kind(str(root), train=False).data)
    assert source.held_out.targets == [0, 1, 2, 3] and source.classes == theirs.classes
    assert sorted(os.listdir(root)) == [f".{kind.filename}.lock", kind.base_folder, kind.filename]


def test_failed_download_states_which_file_to_put_where(server, tmp_path, monkeypatch):
    archive = write_cifar(server, CIFAR10, monkeypatch)
    archive.unlink()
    with pytest.raises(UserError) as refusal:
        read(tmp_path / "data")
    message = str(refusal.value)
    assert message.startswith("dataset.root=") and "\n" not in message
    put = f"put {CIFAR10.url} (MD5 {CIFAR10.tgz_md5}, not unpacked) into {tmp_path / 'data'}"
    assert message.endswith(put) and CIFAR10.url.endswith(CIFAR10.filename)


def test_truncated_download_is_restarted(server, tmp_path, monkeypatch):
    archive = write_cifar(server, CIFAR10, monkeypatch)
    half = archive.with_name(f"{archive.name}.half")
    half.touch()
    root = tmp_path / "data"
    with pytest.raises(UserError, match="corrupted"):
        read(root)
    assert not (root / CIFAR10.base_folder).exists()
    half.unlink()
    assert len(read(root).train) == 20


def test_truncated_unpacking_is_restarted_without_download(server, tmp_path, monkeypatch):
    write_cifar(server, CIFAR10, monkeypatch)
    root = tmp_path / "data"
    first = read(root)
    folder = root / CIFAR10.base_folder
    server.requests.clear()
    (folder / "data_batch_3").unlink()
    for cut_off in ("test_batch", "batches.meta"):
        (folder / cut_off).write_bytes((folder / cut_off).read_bytes()[:99])
        again = read(root)
        assert np.array_equal(pixels(first.train), pixels(again.train))
        assert first.held_out.targets == again.held_out.targets and not server.requests


def test_cifar_is_read_from_a_read_only_folder(server, tmp_path, monkeypatch):
    write_cifar(server, CIFAR10, monkeypatch)
    monkeypatch.setattr(sources, "download_and_extract_archive", None)
    monkeypatch.setattr(Path, "mkdir", None)
    assert len(read(server.folder).train) == 20
    assert not list(server.folder.glob(".*"))


def test_concurrent_processes_download_once(server, tmp_path, monkeypatch):
    write_cifar(server, CIFAR10, monkeypatch)
    read(tmp_path / "alone")
    alone = server.requests.copy()
    with multiprocessing.get_context("fork").Pool(3) as pool:
        sources = pool.map(read, [tmp_path / "data"] * 3)
    assert [len(source.train) for source in sources] == [20, 20, 20]
    assert server.requests == 2 * alone
