"""Checkpoints: last.pt to go on from, best.safetensors for evaluation."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from reproduction.config import AnyModel
from reproduction.models.build import build_model, count_classes, without_weights
from reproduction.models.names import State
from reproduction.models.weights import Newest, extract_weights, matching_state, read_newest
from reproduction.runs.folder import RunFolder
from reproduction.system.errors import UserError
from reproduction.system.storage import BLANK, KEY, WRITER, replacing, seal_archive, write_digest

STATE_KEYS = {
    *("module", "optimizer", "scaler", "non_finite", "best", "run"),
    *("step", "epoch", "totals", "history", "metrics_size", "broken_images"),
    *("classes", "num_images"),
}


def save_last(path: Path, state: dict[str, Any], keep: int = 1) -> None:
    """Writes the whole training state, or nothing; the newest `keep` of them stay."""
    with replacing(path, keep) as temporary:
        with temporary.open("wb") as file:  # of a path torch hides why it could not be written
            torch.save({**state, KEY: True}, file)
        seal_archive(temporary)


def load_last(folder: RunFolder, run: str) -> Newest | None:
    """The newest training state that can be read, of the run with this hash; None before the first.

    UserError if there are some, but none is of use.
    """

    def check(path: Path, state: Any) -> None:
        if not (isinstance(state, dict) and set(state) >= STATE_KEYS):
            raise UserError(f"checkpoint={path}: holds no training state")
        if state["run"] != run:
            raise UserError(f"checkpoint={path}: is of another run")
        folder.check_metrics(state["metrics_size"])

    paths = folder.checkpoints()
    if not paths:
        return None
    return read_newest("checkpoint", paths, check)


def save_plain(path: Path, state: State, classes: list[str] | None) -> None:
    """Writes a plain model's parameters, with its classes where known, or nothing."""
    told = {"format": "pt", "classes": json.dumps(classes), KEY: BLANK, **WRITER}
    with replacing(path) as temporary:
        # save_file would hide the file from all but its owner, and errors of the disk in words
        temporary.write_bytes(save({k: v.contiguous() for k, v in state.items()}, told))
        write_digest(temporary)


def load_plain(paths: list[Path], model: nn.Module, classes: list[str]) -> Path:
    """Loads a plain model from the first file that is readable, of any known kind, and names it.

    Raises UserError if none is, if it does not fit the model, or tells other classes than
    `classes`.
    """
    path, content = read_newest("checkpoint", paths)
    weights = extract_weights(f"checkpoint={path}", content)
    if weights.classes is not None:
        check_classes(path, weights.classes, classes)
    model.load_state_dict(matching_state(weights, model))
    return path


def check_classes(path: Path, trained: list[str], found: list[str]) -> None:
    """Raises UserError unless the classes are those that the checkpoint was trained on."""
    if trained != found:
        raise UserError(
            f"checkpoint={path}: was trained on the classes {_shortened(trained)}, the data set "
            f"has {_shortened(found)}"
        )


def export(config: AnyModel, checkpoints: list[Path], output: Path) -> None:
    """Writes what save_plain writes, of the first file that is readable, of any known kind.

    Raises UserError if none is, or if it does not fit the model.
    """
    path, content = read_newest("checkpoint", checkpoints)
    weights = extract_weights(f"checkpoint={path}", content)
    with torch.device("meta"):
        model = build_model(without_weights(config), count_classes(config, weights.state))
    output.parent.mkdir(parents=True, exist_ok=True)
    state = {k: v.clone() for k, v in matching_state(weights, model).items()}  # own storage
    save_plain(output, state, weights.classes)


def _shortened(names: list[str]) -> str:
    more = f", ... ({len(names)})" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
