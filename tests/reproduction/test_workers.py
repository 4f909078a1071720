"""Processes that load images: where they meet, and what an import alone does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doors import ROOT, SMALL, train
from tests.images import OWN

IMPORT = """
import signal
import warnings
from multiprocessing import util

before = [signal.getsignal(x) for x in signal.valid_signals()]
import reproduction, reproduction.training.run, reproduction.reporting.report
assert [signal.getsignal(x) for x in signal.valid_signals()] == before
callbacks = [x._callback.__module__ for x in util._finalizer_registry.values()]
assert not [x for x in callbacks if x.startswith("reproduction")], callbacks
modules = [x[3].pattern for x in warnings.filters if hasattr(x[3], "pattern")]
assert not [x for x in modules if x.startswith("PIL")], modules
"""


@pytest.mark.slow
def test_workers_meet_below_a_temporary_folder_with_a_long_name(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    """Names of sockets have at most 107 bytes; workers would wait for their parent forever."""
    folder = here / ("long" * 25)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    for ranks in (1, 2):
        words = ("dataset.workers=1", f"devices={ranks}", f"name=run-{ranks}")
        result = train(*OWN, *SMALL, "dataset.eval_limit=null", *words, apart=True)
        assert result.status == 0, result.err


@pytest.mark.slow
def test_an_import_has_no_effects():
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    command = [sys.executable, "-c", IMPORT]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
