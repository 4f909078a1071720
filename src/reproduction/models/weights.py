"""Reads weight files: ours, the published ones, Compact-Transformers' and timm's.

Safetensors are recognised by content; all else is what torch.save has written. Reading a file
executes none of its code.
"""

import argparse
import json
import warnings
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from reproduction.errors import UserError, first_line, warn
from reproduction.machine import is_first_rank
from reproduction.models.names import CLASSES, State, convert_names

# Keys that may hold the state dict, in our checkpoints and those of timm and other projects.
# Averaged weights come first, as in timm's loader.
STATE_DICT_KEYS = ("state_dict_ema", "model_ema", "module", "state_dict", "model")

NUMBERS = "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]  # numpy's codes of types

Newest = tuple[Path, Any]  # a file and its content


class Weights(NamedTuple):
    """The parameters of a plain model, by the names of the file that they were read from.

    `origin` is its `key=path`, `classes` are the class names, if known.
    """

    origin: str
    state: State
    classes: list[str] | None = None

    def named_for(self, model: nn.Module) -> State:
        """Returns them by the names of a model: as they are if it has them, else converted."""
        if self.state.keys() <= model.state_dict().keys():
            return dict(self.state)
        return convert_names(self.state)


def read_file(origin: str, path: Path) -> Any:
    """Reads a file: tensors on the CPU, and plain values.

    The tensors of safetensors are under `module`, and class names in their metadata under
    `classes`. Raises UserError, which starts with `origin`, if that fails.
    """
    try:
        return _content(path)
    except Exception as error:  # torch, safetensors and zipfile raise many types
        raise UserError(f"{origin}: not readable: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What is wrong with a file, without torch's advice, which is unsafe."""
    return first_line(error).partition(". ")[0]


def _content(path: Path) -> Any:
    with path.open("rb") as file:
        head = file.read(9)
    if head[8:] == b"{":
        return _safetensors(path)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch does not compare the checksums
        if damaged:
            raise ValueError(f"damaged, the checksum of {damaged} does not match")
    safe = torch.serialization.safe_globals(_harmless())
    quiet = warnings.catch_warnings(action="ignore")  # about other versions of pickle
    with path.open("rb") as file, safe, quiet:  # torch would act on the name of a path
        content = torch.load(file, map_location="cpu", weights_only=True)
    return tree_map_only(np.generic, lambda number: number.item(), content)


def _safetensors(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as tensors:
        state = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        metadata = tensors.metadata() or {}
    return {"module": state, "classes": json.loads(metadata.get(CLASSES, "null"))}


def _harmless() -> list[Any]:
    """What files may name beside tensors: settings of a command line, and numpy's scalars."""
    scalar = np.float64(0).__reduce__()[0]
    dtypes = {type(np.dtype(code)) for code in NUMBERS}
    before_numpy_2 = (scalar, "numpy.core.multiarray.scalar")
    return [argparse.Namespace, scalar, before_numpy_2, np.dtype, *dtypes]


def read_newest(paths: list[Path]) -> Newest:
    """Returns the first readable checkpoint of a run, and its content.

    Warns on stderr about skipped checkpoints. Raises UserError if none is usable, or if memory or
    the file system fails.
    """
    errors: list[UserError] = []
    for path in paths:
        try:
            content = read_file(f"checkpoint={path}", path)
        except UserError as error:
            may_be_intact = isinstance(error.__cause__, OSError | MemoryError)
            if may_be_intact and path.exists():
                raise
            errors.append(error)
            continue
        if is_first_rank():
            for reason in errors:
                warn(f"warning: {reason}; going back to {path.name}")
        return path, content
    raise UserError("; ".join(map(str, errors)))


def extract_weights(origin: str, content: Any) -> Weights:
    """Finds the weights in the content of a file. UserError if there are none."""
    try:
        state = _state_dict(content)
    except (AttributeError, ValueError) as error:
        raise UserError(f"{origin}: holds no state dict of a model ({error})") from error
    classes = None
    if "module" in content:
        classes = content.get("classes")
    return Weights(origin, state, classes)


def _state_dict(content: Any) -> State:
    """The first state dict in the content of a file, or the content; else ValueError."""
    state = content
    for key in STATE_DICT_KEYS:
        if isinstance(content.get(key), dict):
            state = content[key]
            break
    odd = []
    for name, value in state.items():
        if not (isinstance(name, str) and isinstance(value, Tensor)):
            odd.append(str(name))
    if odd:
        raise ValueError(f"these are no parameters: {len(odd)} ({', '.join(odd[:3])})")
    return state


def load_state(origin: str, state: State, model: nn.Module) -> None:
    """Loads a state with exactly the parameters of a model; on the meta device it takes theirs.

    Raises UserError that names missing and extra parameters and other shapes.
    """
    try:
        model.load_state_dict(state, assign=next(model.parameters()).is_meta)
    except RuntimeError as error:
        title, _, reason = str(error).partition("\n")  # the title names the class alone
        raise UserError(f"{origin}: does not fit the model: {reason or title}") from error
