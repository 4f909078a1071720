"""Checkpoints: last.pt to go on from, best.safetensors for evaluation."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from reproduction.errors import UserError
from reproduction.model_config import AnyModel
from reproduction.models.build import build_model, without_start
from reproduction.models.names import State
from reproduction.models.weights import fitting, read_file, read_weights

STATE_KEYS = {"module", "optimizer", "scaler", "step", "epoch", "totals", "history", "metrics_size"}


def save_last(path: Path, state: dict[str, Any]) -> None:
    """Writes the whole training state, or nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def load_last(path: Path) -> dict[str, Any]:
    """The training state that save_last wrote; UserError if it is none."""
    state = read_file(f"checkpoint={path}", path)
    if not isinstance(state, dict) or not set(state) >= STATE_KEYS:
        raise UserError(f"checkpoint={path}: holds no training state")
    return state


def save_plain(path: Path, state: State, classes: list[str] | None) -> None:
    """Writes a plain model's parameters, with its classes where known, or nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    state = {name: value.contiguous() for name, value in state.items()}
    save_file(state, temporary, metadata={"format": "pt", "classes": json.dumps(classes)})
    os.replace(temporary, path)


def load_plain(path: Path, model: nn.Module, classes: list[str]) -> None:
    """Loads a plain model from a file of any known kind.

    Raises UserError if the file is missing, not readable, does not fit the model, or tells other
    classes than `classes`.
    """
    weights = read_weights("checkpoint", path)
    if weights.classes is not None and weights.classes != classes:
        raise UserError(
            f"checkpoint={path}: was trained on the classes {_shortened(weights.classes)}, the "
            f"data set has {_shortened(classes)}"
        )
    model.load_state_dict(fitting(weights, model))


def export(config: AnyModel, checkpoint: Path, output: Path) -> None:
    """Writes what save_plain writes, of a file of any known kind.

    Raises UserError if the file is not readable or does not fit the model.
    """
    weights = read_weights("checkpoint", checkpoint)
    with torch.device("meta"):
        model = build_model(without_start(config), weights.num_classes)
    output.parent.mkdir(parents=True, exist_ok=True)
    state = {name: value.clone() for name, value in fitting(weights, model).items()}  # of its own
    save_plain(output, state, weights.classes)


def _shortened(names: list[str]) -> str:
    more = f", ... ({len(names)})" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
