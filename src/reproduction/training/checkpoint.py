"""Checkpoints: last.pt to resume from, best.safetensors for evaluation; the plain model in them."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import nn

from reproduction.config import AnyModel
from reproduction.data.loaders import InputTransform, build_input_transform
from reproduction.models.build import build_model, constructor, count_classes, without_weights
from reproduction.models.names import State
from reproduction.models.weights import (
    Newest,
    Weights,
    extract_weights,
    matching_state,
    read_newest,
)
from reproduction.runs.folder import RunFolder
from reproduction.runs.parse import parse_saved
from reproduction.system.errors import UserError
from reproduction.system.storage import BLANK, DIGEST_KEY, WRITER, replacing, write_digest

STATE_KEYS = {
    *("module", "optimizer", "scaler", "non_finite", "best"),
    *("step", "epoch", "history", "metrics_size"),
    *("classes", "num_images"),
}


def save_last(path: Path, state: dict[str, Any], keep: int = 1) -> None:
    """Writes the complete training state atomically and keeps the newest `keep` files."""
    # given a path, torch would hide the reason of an error
    with replacing(path, keep) as temporary, temporary.open("wb") as file:
        torch.save(state, file)


def load_last(folder: RunFolder) -> Newest | None:
    """Reads the newest readable training state of the run; None if there are none.

    Raises UserError if there are some, but none is usable.
    """

    def check(path: Path, state: Any) -> None:
        if not _is_last(state):
            raise UserError(f"checkpoint={path}: holds no training state")
        folder.check_metrics(state["metrics_size"])

    paths = folder.checkpoints()
    if not paths:
        return None
    return read_newest(paths, check)


def _is_last(content: Any) -> bool:
    return isinstance(content, dict) and set(content) >= STATE_KEYS


def save_plain(path: Path, state: State, classes: list[str] | None, **about: str) -> None:
    """Writes a plain model's parameters and, if known, its classes atomically.

    `about` is further metadata.
    """
    metadata = {
        "format": "pt",
        "classes": json.dumps(classes),
        **about,
        DIGEST_KEY: BLANK,
        **WRITER,
    }
    # save_file would ignore the umask and turn errors of the disk into text
    content = save({k: v.contiguous() for k, v in state.items()}, metadata)
    end = 8 + int.from_bytes(content[:8], "little")
    with replacing(path) as temporary:
        with temporary.open("wb") as file:
            file.write(_sorted_header(content[8:end]))
            file.write(memoryview(content)[end:])
        write_digest(temporary)


def _sorted_header(text: bytes) -> bytes:
    """Returns a safetensors header, with its length, whose metadata are in alphabetical order.

    `save` writes them in random order, so equal weights would be different files.
    """
    header = json.loads(text)
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def load_plain(paths: list[Path], model: nn.Module, classes: list[str]) -> dict[str, Any]:
    """Loads a plain model from the first readable file, of any known format.

    Returns its path as `checkpoint` and, of a training state, the last completed epoch and step.
    Raises UserError if none is readable, or if parameters or classes do not fit.
    """
    path, content = read_newest(paths)
    weights = extract_weights(f"checkpoint={path}", content)
    if weights.classes is not None:
        check_classes(path, weights.classes, classes)
    model.load_state_dict(matching_state(weights, model))
    progress = ("epoch", "step") if _is_last(content) else ()
    return {"checkpoint": str(path), **{name: content[name] for name in progress}}


def check_classes(path: Path, trained: list[str], found: list[str]) -> None:
    """Raises UserError unless the checkpoint was trained on the classes of the data set."""
    if trained != found:
        raise UserError(
            f"checkpoint={path}: was trained on the classes {_shortened(trained)}, the data set "
            f"has {_shortened(found)}"
        )


def read_plain(paths: list[Path]) -> tuple[Weights, list[str]]:
    """Returns a plain model's weights and classes from the first readable file; else UserError."""
    path, content = read_newest(paths)
    plain = extract_weights(f"checkpoint={path}", content)
    if plain.classes is None:
        raise UserError(f"checkpoint={path}: holds no names of classes")
    return plain, plain.classes


class Trained(NamedTuple):
    """A trained plain model in evaluation mode, the transform to its input, and class names."""

    model: nn.Module
    transform: InputTransform
    classes: list[str]


def load_run(folder: str | Path, weights: str = "last") -> Trained:
    """Loads a run, or a folder written by make publish, onto the CPU.

    `weights` is `last` or `best`. Predictions equal those of eval.py in float32. Raises UserError
    if the folder holds no such weights, or if they cannot be read.
    """
    run = RunFolder(Path(os.path.expanduser(folder)))
    config = parse_saved(run.read_config(), needs_data=False)
    plain, classes = read_plain(run.weights(weights))
    model = build_model(without_weights(config.model), len(classes))
    model.load_state_dict(matching_state(plain, model))
    return Trained(model.eval(), build_input_transform(config), classes)


def export(
    config: AnyModel,
    checkpoints: list[Path],
    output: Path,
    preprocessing: dict[str, Any] | None = None,
) -> None:
    """Exports the first readable checkpoint, of any known format, as `save_plain` does.

    The metadata hold the model's constructor with its arguments and, if known, `preprocessing`.
    Raises UserError if none is readable, or if it does not fit the model.
    """
    path, content = read_newest(checkpoints)
    weights = extract_weights(f"checkpoint={path}", content)
    build, arguments = constructor(without_weights(config), count_classes(config, weights.state))
    with torch.device("meta"):
        model = build(**arguments)
    about = {
        "constructor": f"{build.__module__}.{build.__qualname__}",
        "arguments": json.dumps(arguments),
        "preprocessing": json.dumps(preprocessing),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    # Tensors that share memory cannot be saved.
    state = {name: value.clone() for name, value in matching_state(weights, model).items()}
    save_plain(output, state, weights.classes, **about)


def _shortened(names: list[str]) -> str:
    more = f", ... ({len(names)})" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
