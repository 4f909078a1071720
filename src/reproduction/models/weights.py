"""Files of weights: ours, the published, Compact-Transformers', timm's, and the original ViT's.

A file is known by its content, never by its name, and reading it executes nothing.
"""

import argparse
import errno
import json
import re
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from reproduction.models.names import State, from_jax, in_our_names
from reproduction.system.errors import UserError, first_line
from reproduction.system.ranks import is_first_rank
from reproduction.system.storage import KEY, WRITER, verify
from reproduction.system.terminal import warn

# Where a dictionary keeps its parameters, if not on top: our runs, timm's and others' training
# scripts. Averaged weights go first, as with timm's own loader.
KEPT_UNDER = ("state_dict_ema", "model_ema", "module", "state_dict", "model")
MOST_UNPACKED = 100  # times the size of its archive: weights hardly shrink, bombs do
BYTEARRAY, PICKLE = b"bytearray", b"\x80"
# Errors of a file that may be whole and readable later.
PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EACCES, errno.EPERM}

Newest = tuple[Path, Any]
Check = Callable[[Path, Any], None]


@dataclass(frozen=True)
class Weights:
    """A plain model's parameters under our names (CCT) or timm's (ViT).

    `origin` is the `key=path` that gave them, `classes` the names of the classes, where known.
    """

    origin: str
    state: State
    classes: list[str] | None


def read_weights(key: str, path: Path) -> Weights:
    """Reads a file of any known kind; `key` is the setting that names it.

    Kinds are safetensors, torch.save of a state dict or of a dictionary that holds one, and the
    .npz of the original ViT. Raises UserError for a file that is missing, broken or none of these.
    """
    origin = f"{key}={path}"
    return weights_of(origin, read_file(origin, path))


def weights_of(origin: str, content: Any) -> Weights:
    """The same of what read_file has read."""
    try:
        if isinstance(content, dict) and any(isinstance(x, np.ndarray) for x in content.values()):
            return Weights(origin, from_jax(content), None)
        state, classes = _parameters(content)
        return Weights(origin, in_our_names(state), classes)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"{origin}: {error}") from error


def fitting(weights: Weights, model: nn.Module, head: Sequence[str] = ()) -> State:
    """The state to load into `model`: exactly its parameters, in its shapes.

    Of the parameters of `head`, a file without them or with others for another number of classes
    leaves the model's own. Raises UserError that names what is missing, extra or of another shape.
    """
    wanted = model.state_dict()
    state = dict(weights.state)
    if head and _has_other_classes(state, wanted, head):
        state |= {name: wanted[name] for name in head}
    lists = {
        "lacks parameters:": [name for name in wanted if name not in state],
        "has others:": [name for name in state if name not in wanted],
    }
    if odd := [f"{what} {_few(names)}" for what, names in lists.items() if names]:
        raise UserError(f"{weights.origin}: does not fit the model, {', '.join(odd)}")
    odd = [name for name in wanted if _kind(state[name]) != _kind(wanted[name])]
    if odd:
        raise UserError(
            f"{weights.origin}: does not fit the model, {len(odd)} of other shapes: {odd[0]} is "
            f"{_kind(state[odd[0]])}, the model has {_kind(wanted[odd[0]])}"
        )
    return state


def fitting_module(origin: str, content: Any, module: nn.Module) -> State:
    """The same of a training state that read_file has read, and of all of `module`."""
    state = content.get("module") if isinstance(content, dict) else None
    if not (isinstance(state, dict) and all(_is_parameter(*item) for item in state.items())):
        raise UserError(f"{origin}: holds no training state")
    return fitting(Weights(origin, state, None), module)


def read_file(origin: str, path: Path) -> Any:
    """What a file holds: tensors on the CPU, arrays (.npz) and plain values.

    safetensors come as `module`, and `classes` if their metadata tells them. UserError begins with
    `origin` and says that the file is missing or not readable.
    """
    try:
        if not path.is_file():
            raise UserError(f"{origin}: there is no such file")
        has_digest = verify(path)
        content = _reader(path)(path)
        if not has_digest and isinstance(content, dict) and content.get(KEY) is True:
            raise ValueError("damaged, its digest is missing")
    except UserError:
        raise
    except Exception as error:  # torch, safetensors, numpy and zipfile raise many kinds
        raise UserError(f"{origin}: not readable: {_reason(error)}") from error
    return content


def read_newest(key: str, paths: list[Path], check: Check = lambda path, content: None) -> Newest:
    """The first of a run's checkpoints that is readable, and what it holds.

    `check` raises UserError for what is no use either. Says on stderr what could not be read;
    UserError if that is all of them.
    """
    refused: list[UserError] = []
    for path in paths:
        try:
            content = read_file(f"{key}={path}", path)
            check(path, content)
        except UserError as error:
            if _will_pass(error.__cause__):
                raise
            refused.append(error)
            continue
        for reason in refused if is_first_rank() else []:
            warn(f"warning: {reason}; going back to {path.name}")
        return path, content
    others = "".join(f", nor is {path.name} of use" for path in paths[1:])
    raise UserError(f"{refused[0]}{others}")


def _will_pass(cause: BaseException | None) -> bool:
    """Whether a file could not be read now, but may be whole."""
    return isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno in PASSING)


def _reason(error: Exception) -> str:
    """What an error says, without torch's advice, which is dangerous."""
    if found := re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)", str(error)):
        return f"it names {found[1]}, which is no weight and could execute anything"
    return first_line(error).partition(". ")[0]


def _reader(path: Path) -> Callable[[Path], Any]:
    """By the first bytes: of a length and JSON, a zip file of .npy or other files, a pickle."""
    with path.open("rb") as file:
        head = file.read(9)
    if head[8:] == b"{":
        return _read_safetensors
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
            if unpacked > MOST_UNPACKED * path.stat().st_size:
                raise ValueError(f"unpacks to {unpacked} bytes, from {path.stat().st_size}")
            if any(name.endswith(".npy") for name in archive.namelist()):
                return _read_npz
    elif head.startswith(b"PK"):
        raise ValueError("damaged, the end of the archive is missing")
    elif not head.startswith(PICKLE):
        raise ValueError("neither safetensors, nor of torch.save, nor an .npz")
    return _read_torch


def _read_safetensors(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        told = file.metadata() or {}
    is_ours = KEY in told or told.items() >= WRITER.items()
    return {"module": state, "classes": json.loads(told.get("classes", "null")), KEY: is_ours}


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _read_torch(path: Path) -> Any:
    """Refuses any pickled object but the settings of timm's script and of the published files."""
    if _mentions_bytearray(path):  # which torch would make, of any size
        raise ValueError("holds a bytearray")
    safe = torch.serialization.safe_globals([argparse.Namespace])
    quiet = warnings.catch_warnings(action="ignore")  # of other versions of pickle
    with path.open("rb") as file, safe, quiet:
        return torch.load(file, map_location="cpu", weights_only=True)  # of a path it sees the name


def _mentions_bytearray(path: Path) -> bool:
    """Whether a pickle in the file does, which has to name it in full."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            return content.find(BYTEARRAY) >= 0
    with zipfile.ZipFile(path) as archive:
        pickles = [name for name in archive.namelist() if name.lower().endswith(".pkl")]
        return any(BYTEARRAY in archive.read(name) for name in pickles)


def _parameters(content: Any) -> tuple[State, list[str] | None]:
    """(the parameters, the classes that a run of ours keeps beside them)."""
    if not isinstance(content, dict):
        raise ValueError(f"holds no state dict but {type(content).__name__}")
    classes = content.get("classes") if "module" in content else None
    if not (classes is None or (isinstance(classes, list) and {type(x) for x in classes} == {str})):
        raise ValueError("holds classes that are no list of names")
    inner = [content[key] for key in KEPT_UNDER if isinstance(content.get(key), dict)]
    state = dict(inner[0] if inner else content)
    if odd := [str(name) for name, value in state.items() if not _is_parameter(name, value)]:
        raise ValueError(f"holds no state dict, these are no parameters: {_few(odd)}")
    return state, classes


def _is_parameter(name: Any, value: Any) -> bool:
    """Whether it is a name and a plain tensor that has as many values as it tells."""
    if not (isinstance(name, str) and isinstance(value, Tensor)):
        return False
    if value.layout != torch.strided or value.is_meta or value.is_quantized:
        return False
    return value.nbytes <= value.untyped_storage().nbytes()


def _has_other_classes(state: State, wanted: State, head: Sequence[str]) -> bool:
    """Whether there is no head, or a whole one of the same width for other classes."""
    found = [state[name].shape for name in head if name in state]
    if len(found) < len(head):
        return not found
    own = [wanted[name].shape for name in head]
    are_others = len({shape[:1] for shape in found}) == 1 and found[0][:1] != own[0][:1]
    return are_others and [shape[1:] for shape in found] == [shape[1:] for shape in own]


def _kind(value: Tensor) -> str:
    shape = str(list(value.shape))
    return shape if value.is_floating_point() else f"{shape} of {value.dtype}"


def _few(names: list[str]) -> str:
    """How many they are, and the first of them."""
    more = ", ..." if len(names) > 3 else ""
    return f"{len(names)} ({', '.join(names[:3])}{more})"
