"""How long a user waits for `train.py --help`, and for the refusal of a mistyped value."""

import subprocess
import sys
import tempfile
from functools import partial
from typing import Any

import torch

from reproduction.config.schema import CONF_DIR
from reproduction.system.timing import Work, time_in_turns
from scripts.benchmark.measure import Row, summary
from scripts.benchmark.scope import Scope

TRAIN = CONF_DIR.parent / "train.py"
COMMANDS = {"--help": 0, "recipe.epochs=0": 2}  # argument -> status


def measure_startup(scope: Scope, device: torch.device) -> list[dict[str, Any]]:
    """Whole processes, warm."""
    works: dict[str, Work] = {
        f"python train.py {argument}": partial(_run, argument, status)
        for argument, status in COMMANDS.items()
    }
    times = time_in_turns(works, scope.starts)
    rows: dict[str, Row] = {name: {"ms": summary(ms)} for name, ms in times.items()}
    return [{"title": "start-up", "about": "whole processes, warm", "rows": rows}]


def _run(argument: str, status: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [sys.executable, str(TRAIN), argument], cwd=folder, capture_output=True, check=False
        )
    assert ended.returncode == status, ended.stderr.decode()
