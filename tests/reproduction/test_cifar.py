"""CIFAR's archives and pickled files: fetched, checked, and read without running anything."""

import hashlib
import multiprocessing
import os
import pickle
import tarfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from torchvision.datasets import CIFAR10, CIFAR100

from reproduction.data.cifar import _unpickled, read_cifar
from reproduction.data.sources import load_source
from reproduction.data.stand_ins import DIGESTS, make_stand_ins
from reproduction.errors import UserError
from tests.reproduction.conftest import Command


class Server(NamedTuple):
    """A folder, the address under which it can be downloaded, and what was asked for."""

    folder: Path
    address: str
    asked: list[str]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Of a file whose name ends with `.half` beside it, it sends one half and hangs up."""
    folder = tmp_path / "server"
    folder.mkdir()
    asked: list[str] = []
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

        def copyfile(self, source: Any, outputfile: Any) -> None:
            content = source.read()
            is_half = Path(folder, f"{self.path[1:]}.half").exists()
            outputfile.write(content[: len(content) // 2] if is_half else content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as http:
        Thread(target=http.serve_forever, args=[0.01], daemon=True).start()
        yield Server(folder, f"http://127.0.0.1:{http.server_port}", asked)
        http.shutdown()


def digest(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def write_cifar(server: Server, kind: type[CIFAR10], monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive of the real layout with 4 images a file; the class is told to expect it."""
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
    train, held_out, classes = read_cifar(name, str(root))
    theirs = kind(str(root))
    assert np.array_equal(train.images, theirs.data) and train.targets == theirs.targets
    assert np.array_equal(held_out.images, kind(str(root), train=False).data)
    assert held_out.targets == [0, 1, 2, 3] and classes == theirs.classes
    assert sorted(os.listdir(root)) == [f".{kind.filename}.lock", kind.base_folder, kind.filename]


def test_cifar_says_what_to_put_where_when_the_download_fails(server, tmp_path, monkeypatch):
    archive = write_cifar(server, CIFAR10, monkeypatch)
    archive.unlink()
    with pytest.raises(UserError) as refusal:
        load_source("cifar10", str(tmp_path / "data"), None)
    said = str(refusal.value)
    assert said.startswith("dataset.root=") and "\n" not in said
    put = f"put {CIFAR10.url} (MD5 {CIFAR10.tgz_md5}, not unpacked) into {tmp_path / 'data'}"
    assert said.endswith(put) and CIFAR10.url.endswith(CIFAR10.filename)


def test_a_download_that_was_cut_off_is_started_again(server, tmp_path, monkeypatch):
    archive = write_cifar(server, CIFAR10, monkeypatch)
    half = archive.with_name(f"{archive.name}.half")
    half.touch()
    root = tmp_path / "data"
    with pytest.raises(UserError, match="corrupted"):
        read_cifar("cifar10", str(root))
    assert not (root / CIFAR10.filename).exists() and not (root / CIFAR10.base_folder).exists()
    half.unlink()
    assert len(read_cifar("cifar10", str(root))[0].targets) == 20
    assert not list(root.glob("*.part"))


def test_an_unpacking_that_was_cut_off_is_started_again_without_a_download(
    server, tmp_path, monkeypatch
):
    write_cifar(server, CIFAR10, monkeypatch)
    root = tmp_path / "data"
    whole = read_cifar("cifar10", str(root))
    folder = root / CIFAR10.base_folder
    server.asked.clear()
    (folder / "data_batch_3").rename(folder / ".data_batch_4.part")
    (folder / "test_batch").write_bytes((folder / "test_batch").read_bytes()[:99])
    again = read_cifar("cifar10", str(root))
    assert np.array_equal(whole[0].images, again[0].images) and whole[1].targets == again[1].targets
    assert not server.asked and not list(folder.glob(".*"))


def test_of_processes_that_start_at_once_one_downloads(server, tmp_path, monkeypatch):
    write_cifar(server, CIFAR10, monkeypatch)
    read_cifar("cifar10", str(tmp_path / "alone"))
    alone = server.asked.copy()
    with multiprocessing.get_context("fork").Pool(3) as pool:
        read = pool.map(partial(read_cifar, "cifar10"), [str(tmp_path / "data")] * 3)
    assert [len(train.targets) for train, *_ in read] == [20, 20, 20]
    assert server.asked == 2 * alone


@pytest.mark.parametrize("how", ["symbolic", "hard", "device", "outside", "missing"])
def test_paths_in_an_archive_lead_nowhere_else(server, tmp_path, monkeypatch, how):
    archive = write_cifar(server, CIFAR10, monkeypatch)
    secret = tmp_path / "secret"
    secret.write_bytes((server.folder / CIFAR10.base_folder / "test_batch").read_bytes())
    types = {"symbolic": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "device": tarfile.CHRTYPE}
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("../evil", str(tmp_path / "evil"), f"{CIFAR10.base_folder}/../../evil"):
            tar.add(secret, name)
        for path in (server.folder / CIFAR10.base_folder).iterdir():
            name = f"{CIFAR10.base_folder}/{path.name}"
            if path.name != "test_batch":
                tar.add(path, name)
            elif how in types:
                link = tarfile.TarInfo(name)
                link.type, link.linkname = types[how], str(secret)
                tar.addfile(link)
            elif how == "outside":
                tar.add(path, f"{CIFAR10.base_folder}/../{name}")
    monkeypatch.setattr(CIFAR10, "tgz_md5", digest(archive))
    with pytest.raises(UserError, match="test_batch"):
        read_cifar("cifar10", str(tmp_path / "here" / "data"))
    assert not list(tmp_path.rglob("evil"))
    assert all(path.is_dir() or path.is_file() for path in (tmp_path / "here").rglob("*"))
    assert not [path for path in tmp_path.rglob("*") if path.is_symlink()]


class Runs:
    """Pickles as a call of what it is made from."""

    def __init__(self, *call: Any):
        self.call = call

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call[0], self.call[1:]


def stand_ins(tmp_path: Path, name: str = "cifar10") -> Path:
    """A folder of stand-ins as a stranger may give it away."""
    make_stand_ins(name, tmp_path / "images")
    return next((tmp_path / "images").iterdir())


def replace(folder: Path, file: str, content: bytes) -> str:
    """Puts a file into stand-ins, whose digests know it; returns dataset.root."""
    (folder / file).write_bytes(content)
    known = yaml.safe_load((folder / DIGESTS).read_text())
    (folder / DIGESTS).write_text(yaml.safe_dump(known | {file: digest(folder / file)}))
    return str(folder.parent)


@pytest.mark.parametrize("file", ["data_batch_2", "test_batch", "batches.meta"])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_run_something_runs_nothing(tmp_path, file, protocol):
    marker, folder = tmp_path / "marker", stand_ins(tmp_path)
    for call in ((os.system, f"touch {marker}"), (eval, f"open({str(marker)!r}, 'w')")):
        content = pickle.dumps({"data": Runs(*call)}, protocol=protocol)
        pickle.loads(content)
        assert marker.exists()
        marker.unlink()
        with pytest.raises(UserError, match=f"{file}: UnpicklingError: asks for"):
            read_cifar("cifar10", replace(folder, file, content))
        assert not marker.exists()


def test_a_run_on_malicious_stand_ins_ends_in_one_line(command: Command, tmp_path: Path):
    content = pickle.dumps(Runs(os.mkdir, str(tmp_path / "marker")))
    root = replace(stand_ins(tmp_path), "data_batch_1", content)
    ended = command("train", "dataset=cifar10", f"dataset.root={root}")
    assert ended.status == 2 and len(ended.lines) == 1
    assert "data_batch_1: UnpicklingError: asks for posix.mkdir" in ended.err
    assert not (tmp_path / "marker").exists() and not (tmp_path / "outputs").exists()


def test_a_changed_file_of_the_published_images_is_not_even_unpickled(
    server, tmp_path, monkeypatch
):
    archive = write_cifar(server, CIFAR10, monkeypatch)
    root = tmp_path / "data"
    before = read_cifar("cifar10", str(root))
    batch = root / CIFAR10.base_folder / "data_batch_1"
    batch.write_bytes(pickle.dumps(Runs(os.mkdir, str(tmp_path / "marker"))))
    assert np.array_equal(read_cifar("cifar10", str(root))[0].images, before[0].images)
    batch.write_bytes(pickle.dumps(Runs(os.mkdir, str(tmp_path / "marker"))))
    archive.unlink()
    (root / CIFAR10.filename).unlink()
    with pytest.raises(UserError, match="could not be downloaded"):
        read_cifar("cifar10", str(root))
    assert not (tmp_path / "marker").exists()


# As Python 2 and numpy 1 wrote the published files: text for bytes, numpy.core.
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


@pytest.mark.filterwarnings("ignore:dtype")
def test_files_are_read_as_pickle_and_numpy_read_them(tmp_path: Path):
    images = np.random.default_rng(0).integers(0, 256, (2, 3072)).astype(np.uint8)
    written = [
        pickle.dumps({"labels": [3, 4], "data": data}, protocol=protocol)
        for protocol in range(5)
        for data in (images, np.asfortranarray(images))
    ]
    for content in (PYTHON_2, *written):
        (tmp_path / "file").write_bytes(content)
        expected = pickle.loads(content, encoding="latin1")
        found = _unpickled(tmp_path, "file", {"file": hashlib.md5(content).hexdigest()})
        assert np.array_equal(found["data"].array(), expected["data"])
        assert found["labels"] == expected["labels"]


IMAGES = np.zeros((2, 3072), np.uint8)
BROKEN = {
    "no dictionary": [1, 2],
    "no data": {"labels": [1]},
    "no labels": {"data": IMAGES},
    "labels of another data set": {"data": IMAGES, "fine_labels": [0, 1]},
    "too few labels": {"data": IMAGES, "labels": [1]},
    "a label out of range": {"data": IMAGES, "labels": [0, 10]},
    "a negative label": {"data": IMAGES, "labels": [0, -1]},
    "a label that is text": {"data": IMAGES, "labels": [0, "1"]},
    "labels that are no list": {"data": IMAGES, "labels": "01"},
    "images of another size": {"data": IMAGES[:, :3000], "labels": [0, 1]},
    "numbers for bytes": {"data": IMAGES.astype(float), "labels": [0, 1]},
    "a list for an array": {"data": IMAGES.tolist(), "labels": [0, 1]},
    "objects": {"data": IMAGES.astype(object), "labels": [0, 1]},
    "no image": {"data": IMAGES[:0], "labels": []},
}


@pytest.mark.parametrize("kind", BROKEN)
def test_batches_of_another_content_are_refused(tmp_path: Path, kind: str):
    root = replace(stand_ins(tmp_path), "data_batch_5", pickle.dumps(BROKEN[kind], protocol=4))
    with pytest.raises(UserError, match="stand-in images are broken") as refusal:
        read_cifar("cifar10", root)
    assert "data_batch_5: " in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("names", [["a"] * 9, list(range(10)), "0123456789", None])
def test_names_of_classes_are_checked(tmp_path: Path, names: Any):
    content = pickle.dumps({"label_names": names})
    with pytest.raises(UserError, match=r"batches\.meta: label_names are no 10 names"):
        read_cifar("cifar10", replace(stand_ins(tmp_path), "batches.meta", content))


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff", b"a: &a [*a]", b"{a: {b: 1}}"])
def test_broken_digests_are_refused(tmp_path: Path, content: bytes):
    folder = stand_ins(tmp_path)
    (folder / DIGESTS).write_bytes(content)
    with pytest.raises(UserError, match="stand-in images are broken"):
        read_cifar("cifar10", str(folder.parent))


def test_mutated_batches_are_refused_or_read(tmp_path: Path):
    """Their digests are made to fit, as a stranger can."""
    folder = stand_ins(tmp_path)
    whole = (folder / "test_batch").read_bytes()
    rng = np.random.default_rng(0)
    ended = {"read": 0, "refused": 0}
    for _ in range(100):
        content = bytearray(whole)
        place = rng.choice([rng.integers(400), rng.integers(len(whole))])  # few bytes are no pixels
        content[place] = rng.integers(256)
        root = replace(folder, "test_batch", bytes(content))
        try:
            read_cifar("cifar10", root)
            ended["read"] += 1
        except UserError as refusal:
            assert "test_batch: " in str(refusal)
            ended["refused"] += 1
    assert min(ended.values()) > 5, ended
