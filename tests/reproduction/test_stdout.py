"""What is printed while work is done."""

import os

import pytest

from reproduction.system.terminal import say


def test_say_goes_on_when_nobody_reads(monkeypatch: pytest.MonkeyPatch):
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        os.close(read)
        say("the first line finds it out")
        say("the next ones go nowhere")
        monkeypatch.undo()
