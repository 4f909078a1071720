"""Progress output."""

import os
import re
import subprocess
import sys

import pytest

from reproduction.commands import jobs
from reproduction.system.terminal import say
from tests.reproduction.conftest import Command


def test_say_ignores_a_closed_pipe(monkeypatch: pytest.MonkeyPatch):
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        os.close(read)
        say("the first line detects it")
        say("later lines are dropped")
        monkeypatch.undo()


def test_scripts_end_silently_when_nobody_reads():
    script = "from reproduction.system.terminal import one_line_errors\n"
    script += "with one_line_errors('script'):\n    print('a', flush=True)\n    print('b' * 10**6)"
    for lines in (script, script.replace("flush=True", "flush=False")):
        pipe = subprocess.PIPE
        with subprocess.Popen([sys.executable, "-c", lines], stdout=pipe, stderr=pipe) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 0


def test_help_of_evaluation_and_export_lists_the_keys_that_apply(command: Command):
    kinds = {
        "eval": {*jobs.EVALUATED_RUN, *jobs.EVALUATED_FILE},
        "export": {*jobs.EXPORTED_RUN, *jobs.EXPORTED_FILE},
    }
    for script, keys in kinds.items():
        groups = {key.partition(".")[0] for key in keys}
        assert {*re.findall(r"^(\w+)  ", command(script, "--help").out, re.MULTILINE)} == groups
