"""CIFAR is downloaded, and unpickled only if the MD5 of every file matches."""

import hashlib
import multiprocessing
import os
import pickle
import tarfile
from collections.abc import Iterator, Mapping
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from torchvision.datasets import CIFAR10, CIFAR100

from reproduction.data import sources
from reproduction.data.images import ArrayImages
from reproduction.data.sources import Source, _open
from reproduction.data.stand_ins import STAND_INS, make_stand_ins
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


def write_cifar(
    server: Server,
    kind: type[CIFAR10],
    monkeypatch: pytest.MonkeyPatch,
    written: Mapping[str, bytes] = MappingProxyType({}),
) -> Path:
    """Serves an archive of the real layout with 4 images per file, and patches its digests."""
    rng = np.random.default_rng(0)
    content = server.folder / kind.base_folder
    content.mkdir(parents=True)
    label = "fine_labels" if kind is CIFAR100 else "labels"
    names = [name for name, _ in (*kind.train_list, *kind.test_list)]
    for name in names:
        data = rng.integers(0, 256, (4, 3072)).astype(np.uint8)
        batch = pickle.dumps({"data": data, label: [0, 1, 2, 3]})
        (content / name).write_bytes(written.get(name, batch))
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


class Call:
    """Pickles as a function call."""

    def __init__(self, *call: Any):
        self.call = call

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call[0], self.call[1:]


def test_stand_ins_are_not_read_from_files(tmp_path: Path):
    make_stand_ins("cifar10", tmp_path / "images")
    folder = tmp_path / "images" / CIFAR10.base_folder
    before = read(tmp_path / "images")
    for file in ("data_batch_1", "batches.meta", STAND_INS):
        (folder / file).write_bytes(pickle.dumps(Call(os.mkdir, str(tmp_path / "marker"))))
    after = read(tmp_path / "images")
    assert np.array_equal(pixels(after.train), pixels(before.train))
    assert after.classes == before.classes and not (tmp_path / "marker").exists()


def test_changed_file_is_not_unpickled(server, tmp_path, monkeypatch):
    archive = write_cifar(server, CIFAR10, monkeypatch)
    root = tmp_path / "data"
    before = read(root)
    for file in ("data_batch_1", "batches.meta"):
        changed = root / CIFAR10.base_folder / file
        changed.write_bytes(pickle.dumps(Call(os.mkdir, str(tmp_path / "marker"))))
        assert np.array_equal(pixels(read(root).train), pixels(before.train))
    changed.write_bytes(pickle.dumps(Call(os.mkdir, str(tmp_path / "marker"))))
    archive.unlink()
    (root / CIFAR10.filename).unlink()
    with pytest.raises(UserError, match="could not be downloaded"):
        read(root)
    assert not (tmp_path / "marker").exists()


# The format of the published files, by Python 2 and numpy 1: text for bytes, numpy.core.
PYTHON_2 = b"".join(
    [
        b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x04trueq\x03U\x06labelsq\x04]q\x05(K\x01K\x02e",
        b"U\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08",
        b"K\x00\x85U\x01b\x87Rq\x09(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01",
        b"\x87Rq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x18\x00\x00",
        np.arange(6144).astype(np.uint8).tobytes(),
        b"tbu.",
    ]
)


def test_python_2_files_are_read_without_warnings(server, tmp_path, monkeypatch, recwarn):
    write_cifar(server, CIFAR10, monkeypatch, {"data_batch_1": PYTHON_2})
    source = read(tmp_path / "data")
    expected = np.arange(6144).astype(np.uint8).reshape(2, 3, 32, 32).transpose(0, 2, 3, 1)
    assert np.array_equal(pixels(source.train)[:2], expected)
    assert source.train.targets[:2] == [1, 2]
    assert not recwarn.list
