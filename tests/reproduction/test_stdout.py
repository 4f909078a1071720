"""Progress output."""

import os

import pytest

from reproduction.system.terminal import say


def test_say_ignores_a_closed_pipe(monkeypatch: pytest.MonkeyPatch):
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        os.close(read)
        say("the first line detects it")
        say("later lines are dropped")
        monkeypatch.undo()
