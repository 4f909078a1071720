"""A run folder is held by one process at a time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reproduction.runs.compose import compose
from reproduction.runs.folder import LOCK, RunFolder
from reproduction.runs.locking import hold
from reproduction.start.resolve import resolve
from reproduction.system.errors import UserError
from tests.reproduction.conftest import SMALL, Command

ONLOOKER = """
import fcntl, sys, time
with open(sys.argv[1]) as file:
    fcntl.flock(file, fcntl.LOCK_SH)
    print(flush=True)
    time.sleep(0.2)
"""


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
