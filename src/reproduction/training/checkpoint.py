"""Checkpoints: last.pt to go on from, best.safetensors for evaluation."""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from reproduction.errors import UserError

PLAIN_PREFIX = "model."  # of the plain model's parameters inside TokenMixup


def save_last(path: Path, state: dict[str, Any]) -> None:
    """Writes the whole training state, or nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def load_last(path: Path) -> dict[str, Any]:
    """The training state; UserError if it cannot be read. Executes nothing."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        reason = str(error).splitlines()[0]
        raise UserError(f"checkpoint={path}: not readable: {reason}") from error


def save_plain(path: Path, model: nn.Module) -> None:
    """Writes the plain model's parameters under its own names, or nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, temporary)
    os.replace(temporary, path)


def load_plain(path: Path, model: nn.Module) -> None:
    """Loads a plain model from best.safetensors, last.pt or a plain state dict.

    Raises UserError if the file is missing, not readable, or does not fit the model.
    """
    if not path.is_file():
        raise UserError(f"checkpoint={path}: there is no such file")
    state = _plain_state(path)
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


def _plain_state(path: Path) -> dict[str, Tensor]:
    if path.suffix != ".safetensors":
        state = load_last(path)
        if isinstance(state, dict) and isinstance(state.get("module"), dict):
            return {
                name.removeprefix(PLAIN_PREFIX): value
                for name, value in state["module"].items()
                if name.startswith(PLAIN_PREFIX)
            }
        if isinstance(state, dict) and all(isinstance(v, Tensor) for v in state.values()):
            return state
        raise UserError(f"checkpoint={path}: holds neither a training state nor a state dict")
    try:
        return load_file(path)
    except Exception as error:  # safetensors' own exception and OSError
        reason = str(error).splitlines()[0]
        raise UserError(f"checkpoint={path}: not readable: {reason}") from error
