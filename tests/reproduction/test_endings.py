"""Failures of disk and memory end a run in one line, without traceback, and it can resume."""

import errno
import hashlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from reproduction.config import Config
from reproduction.reporting import report
from reproduction.runs.folder import RunFolder
from reproduction.training import endings, epochs, evaluate, train
from reproduction.training.loop import Trainer
from tests.reproduction.conftest import SMALL, Command, CommandResult, at_step, trained_run
from tests.reproduction.test_training import assert_same_result, folder

pytestmark = pytest.mark.usefixtures("unevaluated")

TINY = [*SMALL, "recipe.log_every=1", "augmentation=[mixup,htm]"]
MINE = ["name=mine", *TINY]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, unevaluated: None) -> RunFolder:
    root = tmp_path_factory.mktemp("undisturbed")
    return trained_run(root, *TINY)


def assert_plain(result: CommandResult, *parts: str) -> None:
    """Asserts that a run failed with one line."""
    assert (result.status, len(result.lines)) == (1, 1), result.err
    assert result.err.startswith("train.py: ")
    for part in parts:
        assert part in result.err


def failing(function: Callable[..., Any], error: BaseException, call: int) -> Callable[..., Any]:
    """Wraps a function so that its `call`-th call, counted from 1, raises `error`."""
    calls = iter(range(1, 10**6))

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise error
        return function(*args, **kwargs)

    return wrapper


def file_error(number: int, path: Path | None = None) -> OSError:
    return OSError(number, os.strerror(number), path and str(path))


GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
HOST = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to")
LOWER = ["recipe.batch_size=20", "recipe.grad_accum_steps=1", "recipe.precision"]
SHARED = RuntimeError(
    "Caught RuntimeError in DataLoader worker process 0.\nunable to allocate shared memory(shm) "
    "for file </torch_16701_3655625600_0>: No space left on device (28)"
)
# owner, function, call, error, parts of the line
FAULTS: list[tuple[Any, str, int, Exception, list[str]]] = [
    (RunFolder, "append_metrics", 2, file_error(errno.ENOSPC), ["No space left on device"]),
    (epochs, "save_plain", 1, file_error(errno.EROFS), ["Read-only file system"]),
    (epochs, "save_last", 1, file_error(errno.EIO), ["train.py: Input/output error; "]),
    (evaluate, "evaluate", 1, GPU, ["evaluation after step ", "the GPU's memory", *LOWER]),
    (Trainer, "train_step", 1, GPU, ["step ", "the GPU's memory", *LOWER]),
    (Trainer, "train_step", 1, SHARED, ["the shared memory is full", "dataset.workers=0"]),
    (Trainer, "train_step", 1, HOST, ["step ", "this machine's memory", *LOWER]),
    (RunFolder, "write_summary", 2, file_error(errno.EDQUOT), ["Disk quota exceeded"]),
]


def test_faults_end_a_run_in_one_line_and_it_resumes_exactly(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: RunFolder
):
    for owner, name, call, error, parts in FAULTS:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing(getattr(owner, name), error, call))
            result = command("train", *MINE, "resume=auto")
        assert_plain(
            result, "outputs/mine", *parts, "is kept as failed, repeat the command to continue"
        )
        assert folder(tmp_path).read_summary()["status"] == "failed"
    assert command("train", *MINE, "resume=auto").status == 0
    assert_same_result(folder(tmp_path), undisturbed)


def test_run_that_cannot_write_its_status_ends_in_one_line(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*args: Any, **kwargs: Any) -> None:
        raise file_error(errno.ENOSPC)

    def fill() -> None:
        for name in ("append_metrics", "write_summary"):
            monkeypatch.setattr(RunFolder, name, full)

    at_step(monkeypatch, 4, fill)
    assert_plain(command("train", *MINE), "No space left", "kept as it is", "resume=auto")
    assert folder(tmp_path).read_summary()["status"] == "running"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mounts a disk of 2 MiB at outputs/."""
    path = tmp_path / "outputs"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("needs permission to mount")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_run_on_a_full_disk_keeps_its_checkpoint_and_resumes(
    command: Command, small_disk: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: RunFolder
):
    def fill() -> None:
        with (small_disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass

    with monkeypatch.context() as patch:
        at_step(patch, 4, fill)
        result = command("train", *MINE)
    assert_plain(result, "outputs/mine", "No space left on device", "resume=auto")
    mine = RunFolder(small_disk / "mine")
    assert torch.load(mine.last_path, weights_only=True)["step"] == 3
    (small_disk / "ballast").unlink()
    assert command("train", *MINE, "resume=auto").status == 0
    assert_same_result(mine, undisturbed)


def test_a_signal_is_announced_while_a_call_computes(monkeypatch: pytest.MonkeyPatch):
    """Python calls handlers after the call, as of a backward pass."""
    order: list[str] = []
    monkeypatch.setattr(endings, "say", order.append)
    for _ in range(3):  # a signal may come between two calls
        with (
            endings.handling(lambda *_: order.append("handled")),
            endings.announcing("stopping"),
        ):
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            while "handled" not in order:
                hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)
        if order == ["stopping", "handled"]:
            return
        order.clear()
    pytest.fail("each signal was announced after its call")


def test_the_end_of_announcements_waits_for_no_worker():
    worker = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
    with endings.announcing("stopping"):
        worker.start()  # holds what was open
    assert worker.is_alive()
    worker.kill()


def test_folder_that_cannot_be_locked_is_refused(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lock = folder(tmp_path).path / ".lock"
    monkeypatch.setattr(train, "hold", failing(train.hold, file_error(errno.EROFS, lock), 1))
    result = command("train", *MINE)
    assert (result.status, result.lines) == (2, [f"train.py: {lock}: Read-only file system"])
    assert not lock.exists()


def test_run_whose_folder_vanishes_names_it(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    at_step(monkeypatch, 4, lambda: shutil.rmtree(folder(tmp_path).path))
    result = command("train", *MINE)
    assert_plain(result, "outputs/mine/metrics.jsonl: No such file or directory")
    assert not folder(tmp_path).path.exists()


def test_failing_report_does_not_fail_the_run(
    monkeypatch: pytest.MonkeyPatch, undisturbed: RunFolder, capsys: pytest.CaptureFixture[str]
):
    def full(folder: RunFolder, config: Config) -> list[str]:
        raise file_error(errno.ENOSPC)

    monkeypatch.setattr(report, "_draw", full)
    report.write_report(undisturbed, undisturbed.read_summary())
    out, err = capsys.readouterr()
    assert "undisturbed: top-1" in out and "report and pictures" not in out
    assert err.startswith("warning: no report (") and err.count("\n") == 1
    assert "No space left on device" in err and not undisturbed.report_path.exists()
