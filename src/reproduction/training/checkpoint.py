"""Checkpoints: last.pt to go on from, best.safetensors for evaluation."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from reproduction.errors import UserError, first_line

STATE_KEYS = {"module", "optimizer", "scaler", "step", "epoch", "history", "metrics_size"}
PLAIN_PREFIX = "model."  # of the plain model's parameters inside TokenMixup


def save_last(path: Path, state: dict[str, Any]) -> None:
    """Writes the whole training state, or nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def load_last(path: Path) -> dict[str, Any]:
    """The training state that save_last wrote; UserError if it is none."""
    state = _read(path)
    if not isinstance(state, dict) or not set(state) >= STATE_KEYS:
        raise UserError(f"checkpoint={path}: holds no training state")
    return state


def _read(path: Path) -> Any:
    """What a file of torch holds; executes nothing."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise UserError(
            f"checkpoint={path}: not readable as a checkpoint ({type(error).__name__})"
        ) from error


def save_plain(path: Path, model: nn.Module, classes: list[str]) -> None:
    """Writes the plain model's parameters under its own names, with its classes, or nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, temporary, metadata={"classes": json.dumps(classes)})
    os.replace(temporary, path)


def load_plain(path: Path, model: nn.Module, classes: list[str]) -> None:
    """Loads a plain model from best.safetensors, last.pt or a plain state dict.

    Raises UserError if the file is missing, not readable, does not fit the model, or tells other
    classes than `classes`.
    """
    if not path.is_file():
        raise UserError(f"checkpoint={path}: there is no such file")
    state, its_classes = _read_plain(path)
    if its_classes is not None and its_classes != classes:
        raise UserError(
            f"checkpoint={path}: was trained on the classes {_shortened(its_classes)}, the data "
            f"set has {_shortened(classes)}"
        )
    wanted = model.state_dict()
    odd = sorted(set(state) ^ set(wanted))
    if odd:
        raise UserError(
            f"checkpoint={path}: does not fit the model, {len(odd)} parameters are missing or "
            f"extra, such as {odd[0]}"
        )
    for name, value in wanted.items():
        if state[name].shape != value.shape:
            raise UserError(
                f"checkpoint={path}: {name} is {list(state[name].shape)}, the model has "
                f"{list(value.shape)}"
            )
    model.load_state_dict(state)


def _shortened(names: list[str]) -> str:
    more = f", ... ({len(names)})" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _read_plain(path: Path) -> tuple[dict[str, Tensor], list[str] | None]:
    """(the plain model's parameters, its classes if the file tells them)."""
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    state = _read(path)
    if isinstance(state, dict) and isinstance(state.get("module"), dict):
        plain = {
            name.removeprefix(PLAIN_PREFIX): value
            for name, value in state["module"].items()
            if name.startswith(PLAIN_PREFIX)
        }
        return plain, state.get("classes")
    if isinstance(state, dict) and all(_is_parameter(*item) for item in state.items()):
        return state, None
    raise UserError(f"checkpoint={path}: holds neither a training state nor a state dict")


def _is_parameter(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], list[str] | None]:
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            classes = (file.metadata() or {}).get("classes")
    except Exception as error:  # safetensors' own exception and OSError
        raise UserError(f"checkpoint={path}: not readable: {first_line(error)}") from error
    return state, None if classes is None else json.loads(classes)
