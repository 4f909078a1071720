"""What scripts/export.py writes: the plain model of a run or of a file, as safetensors."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.commands.evaluation import chosen_weights
from reproduction.config.model import AnyModel
from reproduction.runs.compose import Composed
from reproduction.runs.folder import check_writable
from reproduction.runs.parse import parse_saved
from reproduction.system.errors import UserError

OF_A_RUN = ("run", "weights", "output")
OF_A_FILE = ("checkpoint", "model", "output")


@dataclass(frozen=True)
class Export:
    """Checkpoints, of which the first readable one counts, their model, and where it goes."""

    model: AnyModel
    checkpoints: list[Path]
    output: Path


def resolve(composed: Composed) -> Export:
    """The checked settings of one export; UserError names what does not belong to it."""
    raw = dict(composed.raw)
    output = _new_file(raw.pop("output", None))
    checkpoints, saved = chosen_weights(composed, raw, OF_A_RUN, OF_A_FILE)
    if saved is not None:  # its images may be elsewhere and are not needed
        raw = {**saved, "dataset": raw["dataset"]}
    return Export(parse_saved(raw).model, checkpoints, output)


def _new_file(output: Any) -> Path:
    if not isinstance(output, str) or not output.endswith(".safetensors"):
        raise UserError(f"output={output}: must be a file ending in .safetensors")
    if os.path.lexists(output):
        raise UserError(f"output={output}: exists already")
    check_writable(Path(output), f"output={output}")
    return Path(output)
