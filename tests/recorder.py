"""Runs a program, and appends to the file FSYNC_LOG what it lets the system do with files.

    python tests/recorder.py PROGRAM WORD ...

Lines are `flush PATH BYTES`, `move PATH TARGET`, and `gone PATH` for a last.pt that is moved away.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

fsync = os.fsync
replace = os.replace


def note(*words: object) -> None:
    with open(os.environ["FSYNC_LOG"], "a") as file:
        print(*words, file=file)


def noted_fsync(descriptor: int) -> None:
    fsync(descriptor)
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    note("flush", path, os.stat(path).st_size)


def noted_replace(path: Any, target: Any) -> None:
    replace(path, target)
    note("move", Path(path).absolute(), Path(target).absolute())
    if Path(path).name == "last.pt":
        note("gone", Path(path).absolute())


if __name__ == "__main__":
    os.fsync = noted_fsync
    os.replace = noted_replace
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)  # as if it was started itself
    runpy.run_path(sys.argv[0], run_name="__main__")
