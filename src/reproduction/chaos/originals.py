"""Small whole files of weights of every kind that can be read."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from reproduction.models.weights import fitting, fitting_module, read_weights
from reproduction.runs import RunFolder
from reproduction.training.checkpoint import load_last, load_plain, save_last, save_plain

RUN = "0123abcd"
CLASSES = ["cat", "dog"]


class Original(NamedTuple):
    """A whole file, the place where it is read from, and how."""

    name: str
    data: bytes
    place: Path
    read: Callable[[], Any]  # what can be compared


def own_files(folder: Path) -> list[Original]:
    """A checkpoint of a run, and its best weights."""
    run = RunFolder(folder)
    run.last_path.parent.mkdir(parents=True)
    save_last(run.last_path, _state(_model()))
    save_plain(run.best_path, _model().state_dict(), CLASSES)
    model = _model()

    def read_last() -> Any:
        newest = load_last(run, RUN)
        assert newest is not None
        path, state = newest
        fitting_module(f"checkpoint={path}", state, model)
        return _comparable(state)

    def read_best() -> Any:
        load_plain([run.best_path], model, CLASSES)
        return _comparable(model.state_dict())

    return [
        _original("last.pt", run.last_path, read_last),
        _original("best.safetensors", run.best_path, read_best),
    ]


def other_files(folder: Path) -> list[bytes]:
    """Whole files that do not belong where ours are: of another model, and of other kinds."""
    folder.mkdir()
    save_last(folder / "state", _state(nn.Linear(4, 2)))
    save_plain(folder / "model", nn.Linear(4, 2).state_dict(), CLASSES)
    save_plain(folder / "classes", _model().state_dict(), ["elk", "dog"])
    np.savez(folder / "arrays.npz", a=np.ones(3))
    (folder / "text").write_text("no weights")
    return [path.read_bytes() for path in sorted(folder.iterdir())]


def foreign_files(folder: Path) -> list[Original]:
    """As other programs write them."""
    folder.mkdir()
    state = _model().state_dict()
    script = {"state_dict": state, "epoch": 3, "args": argparse.Namespace(lr=0.1)}
    for name, content in (("state", state), ("script", script)):
        torch.save(content, folder / f"{name}, zip")
        torch.save(content, folder / f"{name}, legacy", _use_new_zipfile_serialization=False)
    save_file(state, folder / "safetensors")
    with (folder / "arrays").open("wb") as file:
        np.savez(file, **{name: value.numpy() for name, value in state.items()})
    model = _model()

    def read(path: Path) -> Callable[[], Any]:
        return lambda: _comparable(fitting(read_weights("checkpoint", path), model))

    return [_original(path.name, path, read(path)) for path in sorted(folder.iterdir())]


def _original(name: str, place: Path, read: Callable[[], Any]) -> Original:
    return Original(name, place.read_bytes(), place, read)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def _state(model: nn.Module) -> dict[str, Any]:
    """A training state after a step."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {
        "module": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        **{"scaler": {}, "best": None, "classes": CLASSES, "run": RUN},
        **{"step": 1, "epoch": 0, "totals": {}, "history": [], "metrics_size": 0},
    }


def _comparable(content: Any) -> Any:
    """The same with tensors as text, in which NaN equals itself."""
    if isinstance(content, Tensor):
        return str(content.dtype), str(content.tolist())
    if isinstance(content, dict):
        return {key: _comparable(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_comparable(value) for value in content]
    return content
