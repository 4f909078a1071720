"""A run folder is held by one process at a time."""

import os
import subprocess
import sys
import time
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reproduction.runs import locking
from reproduction.runs.compose import compose
from reproduction.runs.folder import LOCK, RunFolder
from reproduction.runs.locking import hold, is_held
from reproduction.start.resolve import resolve
from reproduction.system.errors import RunLocked, UserError
from tests.reproduction.conftest import SMALL, Command

PATIENCES = (0.5, 0.0)  # alternating between processes: wait for the lock, or be refused
ONLOOKER = """
import fcntl, sys, time
with open(sys.argv[1]) as file:
    fcntl.flock(file, fcntl.LOCK_SH)
    print(flush=True)
    time.sleep(0.2)
"""


def status_of_onlooker(folder: RunFolder) -> int:
    """Returns the status of a process that tries to lock the folder: 0 if it succeeds."""
    code = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_SH | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", code, str(folder.path / LOCK)]
    return subprocess.run(command, capture_output=True, check=False).returncode


def contend(root: Path, processes: int, rounds: int) -> dict[str, int]:
    """Starts all processes at the same moment, repeatedly, and counts how often they hold it."""
    context = get_context("fork")
    barrier, results = context.Barrier(processes), context.Queue()
    workers = [
        context.Process(target=acquire, args=(root, number, rounds, barrier, results))
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    rows = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    return {key: sum(row[key] for row in rows) for key in rows[0]}


def acquire(root: Path, number: int, rounds: int, barrier: Barrier, results: Any) -> None:
    """Holds the folder for a moment per round; leaves the beginning of a run every second time."""
    rng = np.random.default_rng(number)
    locking.PATIENCE = PATIENCES[number % len(PATIENCES)]
    counts = {"held": 0, "refused": 0, "together": 0}
    for turn in range(rounds):
        folder = RunFolder(root / f"run-{turn % 3}")
        barrier.wait(60)
        is_held(folder)
        try:
            with hold(folder):
                counts["held"] += 1
                counts["together"] += meets_another(root, rng.uniform(0, 0.003))
                folder.config_path.unlink(missing_ok=True)
                if turn % 2:
                    folder.config_path.touch()
        except RunLocked:
            counts["refused"] += 1
    results.put(counts)


def meets_another(root: Path, seconds: float) -> bool:
    """Returns whether another process enters the folder within `seconds`."""
    inside = root / "inside"
    try:
        os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return True
    time.sleep(seconds)
    inside.unlink(missing_ok=True)
    return False


def test_concurrent_processes_hold_the_folder_one_at_a_time(tmp_path: Path):
    counts = contend(tmp_path, processes=2, rounds=12)
    assert counts["together"] == 0
    assert counts["held"] >= 12


def test_hold_waits_for_a_reader_of_the_lock(tmp_path: Path):
    folder = RunFolder(tmp_path / "mine")
    folder.path.mkdir()
    (folder.path / LOCK).touch()
    command = [sys.executable, "-c", ONLOOKER, str(folder.path / LOCK)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as onlooker:
        assert onlooker.stdout is not None
        onlooker.stdout.readline()
        with hold(folder):
            assert onlooker.wait() == 0


def test_hold_refuses_an_unwritable_folder(tmp_path: Path, monkeypatch):
    def read_only(*args: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    with (
        pytest.raises(UserError, match=r"\.lock: cannot be locked \(Read-only"),
        hold(RunFolder(tmp_path / "mine")),
    ):
        pass


@pytest.mark.parametrize("times", [1, 5, 100])
def test_hold_recreates_a_folder_that_others_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
):
    """A process that ends without a run may remove the folder before its lock is opened."""
    mkdir, remaining = Path.mkdir, [times]

    def mkdir_and_remove(path: Path, *args, **options) -> None:
        mkdir(path, *args, **options)
        if remaining[0]:
            remaining[0] -= 1
            path.rmdir()

    monkeypatch.setattr(locking, "PATIENCE", 0.0)
    monkeypatch.setattr(Path, "mkdir", mkdir_and_remove)
    folder = RunFolder(tmp_path / "mine")
    if times > locking.ATTEMPTS:
        with pytest.raises(UserError, match="mine: a folder cannot be"), hold(folder):
            pass
        return
    with hold(folder):
        assert status_of_onlooker(folder) != 0


@pytest.mark.parametrize("is_own", [True, False])
def test_restarted_ranks_resume_only_their_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_own: bool
):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    config = resolve(compose("train", ["name=mine", f"output_root={tmp_path}", *SMALL]))
    folder = RunFolder.of(config)
    with hold(folder):
        folder.create(config)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    if is_own:
        again = RunFolder.of(config)
        again.check(config)
        with hold(again):
            again.check(config)
            assert status_of_onlooker(again) != 0
        return
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "y")
    with pytest.raises(UserError, match="resume=auto"):
        folder.check(config)


def test_run_created_by_another_process_meanwhile_is_checked_again(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = resolve(compose("train", ["name=mine", "seed=1", *SMALL]))

    def create_other(folder: RunFolder) -> bool:
        folder.create(other)
        return False

    monkeypatch.setattr(RunFolder, "is_finished", create_other)
    result = command("train", "name=mine", "resume=auto", *SMALL)
    assert result.status == 2
    assert "holds another run, this one has seed=0 instead of 1" in result.lines[-1]


def test_run_without_an_option_that_has_no_default_is_another_run(tmp_path: Path):
    """Even if the option is null."""
    args = ["name=mine", "resume=auto", f"output_root={tmp_path}", *SMALL]
    config = resolve(compose("train", args))
    folder = RunFolder.of(config)
    folder.create(config)
    text = folder.config_path.read_text()
    assert "  max_steps: null\n" in text
    folder.config_path.write_text(text.replace("  max_steps: null\n", ""))
    with pytest.raises(UserError, match=r"recipe\.max_steps=None instead of no value; choose"):
        folder.check(config)
