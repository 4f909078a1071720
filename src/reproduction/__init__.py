"""The experiments of the TokenMixup paper: configuration, data, models, training and reports.

Torch is imported when a function is called, so that a refused command does not wait for it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reproduction.training.checkpoint import Trained


def load_run(folder: str | Path, weights: str = "last", source: str | None = None) -> "Trained":
    """Returns the plain model of a run, its transform and classes, see `checkpoint.load_run`."""
    from reproduction.training import checkpoint

    return checkpoint.load_run(folder, weights, source)
