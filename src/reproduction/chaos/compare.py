"""Whether two runs came to the same, bit for bit."""

from collections.abc import Iterator
from typing import Any

import torch

from reproduction.errors import UserError
from reproduction.identity import flatten, hash_of
from reproduction.models.weights import read_file
from reproduction.runs import RunFolder
from reproduction.training.checkpoint import load_last

# What tells how fast a run was; metrics_size counts the digits of that.
TIMES = {"seconds", "train_seconds", "metrics_size", "images_per_second"}
RESULTS = ("top1_", "top5_", "epochs", "steps", "status", "parameters", "seed", "devices")


def differences(one: RunFolder, other: RunFolder) -> list[str]:
    """What differs in checkpoint, best weights, lines and result; empty if nothing but times."""
    return [*_of_checkpoints(one, other), *_of_metrics(one, other), *_of_results(one, other)]


def _of_checkpoints(one: RunFolder, other: RunFolder) -> Iterator[str]:
    for name, read in (("checkpoint", last_state), ("best.safetensors", _best)):
        try:
            ours, theirs = (dict(_leaves(read(run))) for run in (one, other))
        except UserError as error:
            yield f"{one.path.name}: {name}: {error}"
            continue
        for key in sorted(ours.keys() | theirs.keys()):
            if key.rpartition(".")[2] not in TIMES and not _is_same(ours.get(key), theirs.get(key)):
                yield f"{one.path.name}: {name}: {key}"


def last_state(run: RunFolder) -> dict[str, Any]:
    """The newest training state; UserError if there is none that can be read."""
    found = load_last(run, hash_of(run.read_config()))
    if found is None:
        raise UserError(f"{run.path}: holds no checkpoint")
    return found[1]


def _best(run: RunFolder) -> Any:
    return read_file(f"checkpoint={run.best_path}", run.best_path)


def _leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in a training state."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(state, list | tuple):
        yield from _leaves(dict(enumerate(state)), name)
    else:
        yield name, state


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and one == other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.numpy(force=True).tobytes() == other.numpy(force=True).tobytes()


def _of_metrics(one: RunFolder, other: RunFolder) -> Iterator[str]:
    for kind, ours, theirs in zip(
        ("batches", "epochs"), one.read_metrics(), other.read_metrics(), strict=True
    ):
        if len(ours) != len(theirs):
            yield f"{one.path.name}: {len(ours)} lines of {kind} for {len(theirs)}"
        for mine, its in zip(ours, theirs, strict=False):
            if _without_times(mine) != _without_times(its):
                yield f"{one.path.name}: line of {kind}: {mine}"


def _of_results(one: RunFolder, other: RunFolder) -> Iterator[str]:
    ours, theirs = (
        {key: value for key, value in flatten(run.read_summary()) if key.startswith(RESULTS)}
        for run in (one, other)
    )
    if ours != theirs:
        yield f"{one.path.name}: summary: {ours} for {theirs}"


def _without_times(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in TIMES}
