"""Reads weight files: ours, the published ones, Compact-Transformers' and timm's.

Files are recognised by content, and reading them executes no code.
"""

import argparse
import json
import re
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from reproduction.models.names import State, convert_names
from reproduction.system.errors import UserError, first_line
from reproduction.system.ranks import is_first_rank
from reproduction.system.storage import DIGEST_KEY, WRITER, verify
from reproduction.system.terminal import warn

# Keys that may hold the state dict, in our checkpoints and those of timm and other projects.
# Averaged weights come first, as in timm's loader.
STATE_DICT_KEYS = ("state_dict_ema", "model_ema", "module", "state_dict", "model")
NUMPY_SCALAR = np.float64(0).__reduce__()[0]
NUMBERS: list[Any] = [  # what numpy's scalars are pickled with, which other scripts save
    *((NUMPY_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    np.dtype,
    *{type(np.dtype(code)) for code in "?" + np.typecodes["AllInteger"] + np.typecodes["Float"]},
]
BEGINNINGS = (b"PK", b"\x80")  # of a zip archive and of a pickle, both by torch.save

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

    Formats are safetensors, and torch.save of a state dict or a dictionary that contains one.
    Raises UserError for any other, missing or broken file.
    """
    origin = f"{key}={path}"
    return extract_weights(origin, read_file(origin, path))


def extract_weights(origin: str, content: Any) -> Weights:
    """Extracts the weights from the result of `read_file`. UserError as for `read_weights`."""
    try:
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
    if not isinstance(state, dict):
        raise UserError(f"{origin}: holds no training state")
    return matching_state(Weights(origin, state, None), module)


def read_file(origin: str, path: Path) -> Any:
    """Reads a file: tensors on the CPU, and plain values.

    The tensors of safetensors are under `module`, and class names in their metadata under
    `classes`. Raises UserError, which starts with `origin`, if the file is missing or unreadable.
    """
    try:
        if not path.is_file():
            raise UserError(f"{origin}: there is no such file")
        return _content(path)
    except UserError:
        raise
    except Exception as error:  # torch, safetensors and zipfile raise many types
        raise UserError(f"{origin}: not readable: {_reason(error)}") from error


def read_newest(paths: list[Path], check: Check = lambda path, content: None) -> Newest:
    """Returns the first readable checkpoint of a run and its content.

    `check` raises UserError for unusable content. Warns on stderr about skipped checkpoints. Raises
    UserError if none is usable, or if memory or the file system fails.
    """
    errors: list[UserError] = []
    for path in paths:
        try:
            content = read_file(f"checkpoint={path}", path)
            check(path, content)
        except UserError as error:
            if isinstance(error.__cause__, OSError | MemoryError):  # the file may be intact
                raise
            errors.append(error)
            continue
        for reason in errors if is_first_rank() else []:
            warn(f"warning: {reason}; going back to {path.name}")
        return path, content
    others = ", ".join(path.name for path in paths[1:])
    raise UserError(f"{errors[0]}; not usable either: {others}" if others else str(errors[0]))


def _reason(error: Exception) -> str:
    """Returns the message of an error without torch's advice, which is unsafe."""
    if match := re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)", str(error)):
        return f"it names {match[1]}, which is not a weight and could execute code"
    return first_line(error).partition(". ")[0]


def _content(path: Path) -> Any:
    """Reads safetensors, or what torch.save has written: a zip archive or, long ago, a pickle."""
    with path.open("rb") as file:
        head = file.read(9)
    if head[8:] == b"{":
        return _read_safetensors(path)
    if not head.startswith(BEGINNINGS):
        raise ValueError("neither safetensors nor torch.save")
    if zipfile.is_zipfile(path):  # torch does not compare the checksums
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"damaged, the checksum of {damaged} does not match")
    # Published files hold a Namespace.
    safe = torch.serialization.safe_globals([argparse.Namespace, *NUMBERS])
    quiet = warnings.catch_warnings(action="ignore")  # about other pickle versions
    with path.open("rb") as file, safe, quiet:
        return torch.load(file, map_location="cpu", weights_only=True)  # a path's name has effects


def _read_safetensors(path: Path) -> dict[str, Any]:
    has_digest = verify(path)
    with safe_open(path, framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
    if not has_digest and (DIGEST_KEY in metadata or metadata.items() >= WRITER.items()):
        raise ValueError("damaged, its digest is missing")
    return {"module": state, "classes": json.loads(metadata.get("classes", "null"))}


def _parameters(content: Any) -> tuple[State, list[str] | None]:
    """Returns the parameters, and the class names if our checkpoint has them."""
    if not isinstance(content, dict):
        raise ValueError(f"holds no state dict but {type(content).__name__}")
    classes = content.get("classes") if "module" in content else None
    inner = [content[key] for key in STATE_DICT_KEYS if isinstance(content.get(key), dict)]
    state = dict(inner[0] if inner else content)
    if odd := [str(name) for name, value in state.items() if not isinstance(value, Tensor)]:
        raise ValueError(f"holds no state dict, these are not parameters: {_summary(odd)}")
    return state, classes


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
