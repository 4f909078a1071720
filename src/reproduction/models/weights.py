"""Reads weight files: ours, the published ones, Compact-Transformers', timm's, the original ViT's.

Files are recognised by content, never by name, and reading them executes no code.
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

from reproduction.models.names import State, convert_names, from_jax
from reproduction.system.errors import UserError, first_line
from reproduction.system.ranks import is_first_rank
from reproduction.system.storage import KEY, WRITER, verify
from reproduction.system.terminal import warn

# Keys that may hold the state dict, in our checkpoints and those of timm and other projects.
# Averaged weights come first, as in timm's loader.
STATE_DICT_KEYS = ("state_dict_ema", "model_ema", "module", "state_dict", "model")
MAX_COMPRESSION = 100  # weights hardly compress, zip bombs do
NUMPY_SCALAR = np.float64(0).__reduce__()[0]
NUMBERS: list[Any] = [  # what numpy's scalars are pickled with; other dtypes may hold objects
    *((NUMPY_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    np.dtype,
    *{type(np.dtype(code)) for code in "?" + np.typecodes["AllInteger"] + np.typecodes["Float"]},
]
BYTEARRAY, PICKLE = b"bytearray", b"\x80"
# Transient errors: the file may be intact and readable later.
TRANSIENT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EACCES, errno.EPERM}

Newest = tuple[Path, Any]
Check = Callable[[Path, Any], None]


@dataclass(frozen=True)
class Weights:
    """The parameters of a plain model under our names (CCT) or timm's (ViT).

    `origin` is the `key=path` they were read from, `classes` the class names, if known.
    """

    origin: str
    state: State
    classes: list[str] | None


def read_weights(key: str, path: Path) -> Weights:
    """Reads a weight file of any supported format; `key` is the setting that names it.

    Formats are safetensors, torch.save of a state dict or a dictionary that contains one, and the
    .npz of the original ViT. Raises UserError for any other, missing or broken file.
    """
    origin = f"{key}={path}"
    return extract_weights(origin, read_file(origin, path))


def extract_weights(origin: str, content: Any) -> Weights:
    """Extracts the weights from the result of `read_file`. UserError as for `read_weights`."""
    try:
        if isinstance(content, dict) and any(isinstance(x, np.ndarray) for x in content.values()):
            return Weights(origin, from_jax(content), None)
        state, classes = _parameters(content)
        return Weights(origin, convert_names(state), classes)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"{origin}: {error}") from error


def matching_state(weights: Weights, model: nn.Module, head: Sequence[str] = ()) -> State:
    """Returns the state to load into `model`, with exactly its parameters and shapes.

    If the parameters of `head` are missing or for another number of classes, the model keeps its
    own. Raises UserError that names missing and extra parameters and other shapes.
    """
    expected = model.state_dict()
    state = dict(weights.state)
    if head and _needs_new_head(state, expected, head):
        state |= {name: expected[name] for name in head}
    lists = {
        "lacks parameters:": [name for name in expected if name not in state],
        "has others:": [name for name in state if name not in expected],
    }
    if problems := [f"{label} {_summary(names)}" for label, names in lists.items() if names]:
        raise UserError(f"{weights.origin}: does not fit the model, {', '.join(problems)}")
    odd = [name for name in expected if _shape(state[name]) != _shape(expected[name])]
    if odd:
        raise UserError(
            f"{weights.origin}: does not fit the model, {len(odd)} of other shapes: {odd[0]} is "
            f"{_shape(state[odd[0]])}, the model has {_shape(expected[odd[0]])}"
        )
    return state


def module_state(origin: str, content: Any, module: nn.Module) -> State:
    """Returns the state of all of `module` from the content of a training checkpoint."""
    state = content.get("module") if isinstance(content, dict) else None
    if not (isinstance(state, dict) and all(_is_parameter(*item) for item in state.items())):
        raise UserError(f"{origin}: holds no training state")
    return matching_state(Weights(origin, state, None), module)


def read_file(origin: str, path: Path) -> Any:
    """Reads a file: tensors on the CPU, arrays (.npz) and plain values.

    The tensors of safetensors are under `module`, and class names in their metadata under
    `classes`. Raises UserError, which starts with `origin`, if the file is missing or unreadable.
    """
    try:
        if not path.is_file():
            raise UserError(f"{origin}: there is no such file")
        return _reader(path)(path)
    except UserError:
        raise
    except Exception as error:  # torch, safetensors, numpy and zipfile raise many types
        raise UserError(f"{origin}: not readable: {_reason(error)}") from error


def read_newest(paths: list[Path], check: Check = lambda path, content: None) -> Newest:
    """Returns the first readable checkpoint of a run and its content.

    `check` raises UserError for unusable content. Warns on stderr about skipped checkpoints. Raises
    UserError if none is usable, or if the error is transient.
    """
    errors: list[UserError] = []
    for path in paths:
        try:
            content = read_file(f"checkpoint={path}", path)
            check(path, content)
        except UserError as error:
            if _is_transient(error.__cause__):
                raise
            errors.append(error)
            continue
        for reason in errors if is_first_rank() else []:
            warn(f"warning: {reason}; going back to {path.name}")
        return path, content
    others = ", ".join(path.name for path in paths[1:])
    raise UserError(f"{errors[0]}; not usable either: {others}" if others else str(errors[0]))


def _is_transient(cause: BaseException | None) -> bool:
    """Whether reading may succeed later."""
    if isinstance(cause, OSError):
        return cause.errno in TRANSIENT
    return isinstance(cause, MemoryError)


def _reason(error: Exception) -> str:
    """Returns the message of an error without torch's advice, which is unsafe."""
    if match := re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)", str(error)):
        return f"it names {match[1]}, which is not a weight and could execute code"
    return first_line(error).partition(". ")[0]


def _reader(path: Path) -> Callable[[Path], Any]:
    """Selects the reader by content: safetensors, a zip of .npy or other files, or a pickle."""
    with path.open("rb") as file:
        head = file.read(9)
    if head[8:] == b"{":
        return _read_safetensors
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
            if unpacked > MAX_COMPRESSION * path.stat().st_size:
                raise ValueError(f"unpacks to {unpacked} bytes, from {path.stat().st_size}")
            if damaged := archive.testzip():
                raise ValueError(f"damaged, the checksum of {damaged} does not match")
            if any(name.endswith(".npy") for name in archive.namelist()):
                return _read_npz
    elif head.startswith(b"PK"):
        raise ValueError("damaged, the end of the archive is missing")
    elif not head.startswith(PICKLE):
        raise ValueError("neither safetensors, nor torch.save, nor .npz")
    return _read_torch


def _read_safetensors(path: Path) -> dict[str, Any]:
    has_digest = verify(path)
    with safe_open(path, framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
    if not has_digest and (KEY in metadata or metadata.items() >= WRITER.items()):
        raise ValueError("damaged, its digest is missing")
    return {"module": state, "classes": json.loads(metadata.get("classes", "null"))}


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _read_torch(path: Path) -> Any:
    """Loads with `weights_only`. Allows Namespace, as in published files, and numpy's numbers."""
    if _mentions_bytearray(path):  # torch would allocate it at any size
        raise ValueError("holds a bytearray")
    safe = torch.serialization.safe_globals([argparse.Namespace, *NUMBERS])
    quiet = warnings.catch_warnings(action="ignore")  # about other pickle versions
    with path.open("rb") as file, safe, quiet:
        return torch.load(file, map_location="cpu", weights_only=True)  # a path's name has effects


def _mentions_bytearray(path: Path) -> bool:
    """Whether a pickle in the file names `bytearray`."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            return content.find(BYTEARRAY) >= 0
    with zipfile.ZipFile(path) as archive:
        pickles = [name for name in archive.namelist() if name.lower().endswith(".pkl")]
        return any(BYTEARRAY in archive.read(name) for name in pickles)


def _parameters(content: Any) -> tuple[State, list[str] | None]:
    """Returns the parameters, and the class names if our checkpoint has them."""
    if not isinstance(content, dict):
        raise ValueError(f"holds no state dict but {type(content).__name__}")
    classes = content.get("classes") if "module" in content else None
    if not (classes is None or (isinstance(classes, list) and {type(x) for x in classes} == {str})):
        raise ValueError("holds classes that are not a list of names")
    inner = [content[key] for key in STATE_DICT_KEYS if isinstance(content.get(key), dict)]
    state = dict(inner[0] if inner else content)
    if odd := [str(name) for name, value in state.items() if not _is_parameter(name, value)]:
        raise ValueError(f"holds no state dict, these are not parameters: {_summary(odd)}")
    return state, classes


def _is_parameter(name: Any, value: Any) -> bool:
    """Whether it is a name and a plain tensor whose storage holds all its values."""
    if not (isinstance(name, str) and isinstance(value, Tensor)):
        return False
    if value.layout != torch.strided or value.is_meta or value.is_quantized:
        return False
    return value.nbytes <= value.untyped_storage().nbytes()


def _needs_new_head(state: State, expected: State, head: Sequence[str]) -> bool:
    """Whether the head is missing, or complete but for another number of classes."""
    shapes = [state[name].shape for name in head if name in state]
    if len(shapes) < len(head):
        return not shapes
    own = [expected[name].shape for name in head]
    is_other = len({shape[:1] for shape in shapes}) == 1 and shapes[0][:1] != own[0][:1]
    return is_other and [shape[1:] for shape in shapes] == [shape[1:] for shape in own]


def _shape(value: Tensor) -> str:
    shape = str(list(value.shape))
    return shape if value.is_floating_point() else f"{shape} of {value.dtype}"


def _summary(names: list[str]) -> str:
    """Returns the number of names and the first three."""
    more = ", ..." if len(names) > 3 else ""
    return f"{len(names)} ({', '.join(names[:3])}{more})"
