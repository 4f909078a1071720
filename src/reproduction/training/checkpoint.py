"""Checkpoints: last.pt to resume from, best.safetensors for evaluation; the plain model in them."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import nn

from reproduction.config import AnyModel, Checkpoint, Own
from reproduction.data.loaders import InputTransform, build_evaluation_transform
from reproduction.errors import UserError
from reproduction.files import replacing
from reproduction.folder import RunFolder
from reproduction.models.build import (
    build_model,
    build_trained,
    constructor,
    count_classes,
    without_memory,
    without_weights,
)
from reproduction.models.names import CLASSES, State
from reproduction.models.weights import Weights, extract_weights, load_state, read_newest

MOST_TIME = 0.05  # of that since the last checkpoint: what one at the end of an epoch may take


class Clock:
    """When to write a checkpoint, by the clock of a rank."""

    def __init__(self, settings: Checkpoint):
        self.settings = settings
        self.saved = time.monotonic()  # when the last one was
        self.seconds = 0.0  # that it took

    def is_late(self) -> bool:
        """Whether `every_minutes` have passed since the last checkpoint."""
        minutes = self.settings.every_minutes
        return minutes is not None and time.monotonic() - self.saved >= 60 * minutes

    def is_due(self, epoch: int) -> bool:
        """Whether to save at the end of an epoch: every `every_epochs`, or if it costs little."""
        if self.settings.every_epochs is not None:
            return epoch % self.settings.every_epochs == 0
        return self.seconds <= MOST_TIME * (time.monotonic() - self.saved)

    def save(self, folder: RunFolder, state: dict[str, Any]) -> None:
        """Writes the complete state of a run, and keeps the previous one."""
        began = time.monotonic()
        with replacing(folder.last_path) as temporary:
            with temporary.open("wb") as file:  # given a path, torch would hide an error's reason
                torch.save(state, file)
            folder.keep_last()
        self.saved = time.monotonic()
        self.seconds = self.saved - began


def save_plain(path: Path, state: State, classes: list[str] | None, **about: str) -> None:
    """Writes a plain model's parameters atomically; classes and `about` are metadata."""
    metadata = {"format": "pt", CLASSES: json.dumps(classes), **about}
    # save_file would ignore the umask and turn errors of the disk into text
    content = save({name: value.contiguous() for name, value in state.items()}, metadata)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def weights_digest(state: State) -> str:
    """Returns the sha256 over names and tensor bytes: equal weights have equal digests."""
    sha = hashlib.sha256()
    for name, value in sorted(state.items()):
        sha.update(name.encode())
        sha.update(value.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def read_plain(paths: list[Path]) -> tuple[Weights, dict[str, Any]]:
    """Reads a plain model from the first readable file, of any known format; else UserError.

    Also returns its path as `checkpoint` and, of a training state, completed `epoch` and `step`.
    """
    path, content = read_newest(paths)
    progress = {key: content[key] for key in ("epoch", "step") if key in content}
    return extract_weights(f"checkpoint={path}", content), {"checkpoint": str(path), **progress}


def check_classes(origin: str, trained: list[str], found: list[str]) -> None:
    """Raises UserError unless the checkpoint was trained on the classes of the data set."""
    if trained != found:
        then, now = (f"{', '.join(names[:3])} ({len(names)})" for names in (trained, found))
        raise UserError(f"{origin}: was trained on the classes {then}, the data set has {now}")


class Trained(NamedTuple):
    """A trained plain model in evaluation mode, the transform to its input, and class names."""

    model: nn.Module
    transform: InputTransform
    classes: list[str]


def load_run(folder: str | Path, weights: str = "last", source: str | None = None) -> Trained:
    """Loads the `last` or `best` weights of a run onto the CPU; UserError if there are none.

    Predictions equal those of eval.py in float32. `source` lets the code of a model of one's own
    run: it must be the `model.source` of the run.
    """
    run = RunFolder(Path(folder).expanduser())
    config = run.read_config()
    path = config.model.source if isinstance(config.model, Own) else None
    if path != source:
        raise UserError(f"run={folder}: its model.source is {path}, and must be given as source")
    plain, _ = read_plain(run.weights(weights))
    classes = plain.classes
    if classes is None:
        raise UserError(f"{plain.origin}: names no classes, which load_run returns")
    model = build_trained(config.model, plain, len(classes))
    crop = build_evaluation_transform(config)
    transform = InputTransform(crop, config.dataset.mean, config.dataset.std)
    return Trained(model.eval(), transform, classes)


def export(
    config: AnyModel,
    checkpoints: list[Path],
    output: Path,
    preprocessing: dict[str, Any] | None,
) -> None:
    """Exports the first readable checkpoint, of any known format, as `save_plain` does.

    The metadata hold the model's constructor with its arguments and, if known, `preprocessing`.
    """
    weights, _ = read_plain(checkpoints)
    config = without_weights(config)
    classes = count_classes(config, weights)
    build, arguments = constructor(config, classes)
    with without_memory(config):
        model = build_model(config, classes)
    state = weights.named_for(model)
    load_state(weights.origin, state, model)  # UserError if it does not fit
    about = {
        "constructor": f"{build.__module__}.{build.__qualname__}",
        "arguments": json.dumps(arguments),
        "preprocessing": json.dumps(preprocessing),
    }
    # Tensors that share memory cannot be saved.
    copies = {name: value.clone() for name, value in state.items()}
    save_plain(output, copies, weights.classes, **about)
