"""Turns the command lines of train.py, eval.py and export.py into checked settings."""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from reproduction.config import Config
from reproduction.runs.compose import Composed, group_options
from reproduction.runs.folder import PUBLISHED, RunFolder, check_writable, find_runs
from reproduction.runs.identity import (
    FIXED,
    PATHS,
    changes_result,
    default_name,
    differing_data,
    flatten,
    plain_path,
    run_hash,
    short_digest,
)
from reproduction.runs.parse import check_named, parse, parse_saved
from reproduction.system.errors import UserError
from reproduction.system.ranks import is_first_rank
from reproduction.system.storage import temporary_name

Keys = tuple[str, ...]
CHANGEABLE = ("device", "devices", "dataset", "recipe.precision")  # for evaluating a run
TRAINING_ONLY = ("dataset.limit", "dataset.validation", "dataset.validation_seed")
EVALUATED_RUN: Keys = ("run", "weights", "images", "predictions", *CHANGEABLE)
PREDICTED_RUN: Keys = (
    *("run", "weights", "images", "predictions"),
    *("device", "devices", "dataset.workers", "recipe.precision"),
)
EVALUATED_FILE: Keys = (
    *("checkpoint", "predictions", "device", "devices"),
    *("model", "dataset", "recipe", "output_root"),
)
EXPORTED_RUN: Keys = ("run", "weights", "output")
EXPORTED_FILE: Keys = ("checkpoint", "model", "output")


def resolve(composed: Composed) -> Config:
    """Returns the typed configuration of one point, with the name of its run.

    With resume=auto and no name, it is the name of the folder that holds this run, if there is one.
    """
    try:
        config = parse(composed.raw)
    except UserError as error:
        wrong = str(error).partition("=")[0]
        typed = [key for key in composed.overrides if _overlap(key, wrong)]
        if composed.experiment is None or typed:
            raise
        raise UserError(f"experiment={composed.experiment}: {error}") from None
    _check_source(config, composed)
    name = config.name
    if name is None and config.resume == "auto":
        root = Path(config.output_root)
        changed = root.stat().st_mtime_ns if root.is_dir() else 0
        name = _names_by_hash(root, changed).get(run_hash(config))
    name = name or default_name(config, composed.experiment, _changes(composed))
    return dataclasses.replace(config, name=name)


def _overlap(key: str, other: str) -> bool:
    """Whether one of two dotted keys is, or holds, the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


@lru_cache(maxsize=1)
def _names_by_hash(root: Path, changed: int) -> dict[str, str]:
    """Returns the names of the runs by hash; read once for all points of a sweep."""
    return {key: folder.path.name for key, folder in find_runs(root).items()}


def _changes(composed: Composed) -> list[str]:
    """Returns the overrides of single settings that change the result, seed apart, and recipe=."""
    values = dict(flatten(composed.raw))
    return [
        f"{key}={plain_path(str(values[key]))}"
        if key in PATHS and values[key] is not None
        else text
        for key, text in composed.overrides.items()
        if changes_result(key) and (key == "recipe" or not group_options(key))
        if key != "seed" and not key.startswith("hydra")
    ]


def _check_source(config: Config, composed: Composed) -> None:
    """Raises UserError for own data whose function is not named on the command line."""
    if "dataset.source" not in composed.overrides:
        check_named(config.dataset)


def check_all(configs: list[Config], here: bool = True) -> None:
    """Raises UserError if any point cannot run, before the first one starts.

    Devices are checked only if the runs execute `here`, on this machine.
    """
    folders = [RunFolder.of(config) for config in configs]
    for folder, config in zip(folders, configs, strict=True):
        folder.check(config)
    path, points = Counter(folder.path for folder in folders).most_common(1)[0]
    if points > 1:
        raise UserError(
            f"name={path.name}: {points} points of the sweep share this folder; leave name out "
            "and sweep over settings that change the result"
        )
    from reproduction.training.run import check  # imports torch, so last

    for folder, config in zip(folders, configs, strict=True):
        check_data(folder, config)
        if not folder.is_finished():
            check(config, here)


def check_data(folder: RunFolder, config: Config) -> None:
    """Raises UserError if the run in this folder, if any, was trained on other data."""
    if gap := other_data(folder, config):
        raise UserError(
            f"name={folder.path.name}: {folder.path} was trained on other data: {gap}; choose "
            "another output_root=..., or move that folder away"
        )


def other_data(folder: RunFolder, config: Config) -> str | None:
    """Says how the data differ from those that the run in this folder was trained on.

    None if they agree, or if nothing is known: runs of before kept no record, one that ended before
    its first checkpoint begins anew, and the images of a finished run on a data set that is always
    the same may be gone.
    """
    then, data = folder.read_summary().get("data"), config.dataset
    if not (folder.is_finished() or folder.checkpoints()):
        return None
    if not then or not is_first_rank() or (data.name in FIXED and folder.is_finished()):
        return None
    from reproduction.data.sources import opened, record  # imports torch

    gap = differing_data(then, record(opened(data), config.model.weights))
    return None if gap is None else f"{data.root or data.source or data.name}: {gap}"


@dataclass(frozen=True)
class WeightsTask:
    """Candidate checkpoints (the first readable one is used), their configuration, the output.

    `predictions` is a further file of an evaluation, the only one of `images`, a folder without
    classes. `is_run` tells whether the whole configuration is that of the weights, or, for an
    export, only its model.
    """

    config: Config
    checkpoints: list[Path]
    result: Path
    predictions: Path | None = None
    images: Path | None = None
    is_run: bool = True


def resolve_export(composed: Composed) -> WeightsTask:
    """Returns the checked settings of one export; UserError names overrides that do not apply."""
    raw = dict(composed.raw)
    output = _new_file("output", raw.pop("output", None), ".safetensors")
    checkpoints, saved = _select_weights(composed, raw, EXPORTED_RUN, EXPORTED_FILE)
    config = parse_saved(saved or raw, needs_data=False)
    return WeightsTask(config, checkpoints, output, is_run=saved is not None)


def _new_file(key: str, name: Any, ending: str) -> Path:
    """Returns the path. Raises UserError if no file with this ending can be created there."""
    if not isinstance(name, str) or not name.endswith(ending):
        raise UserError(f"{key}={name}: must be a file ending in {ending}")
    if os.path.lexists(name):
        raise UserError(f"{key}={name}: already exists")
    check_writable(Path(name), f"{key}={name}")
    with suppress(FileNotFoundError):
        os.lstat(temporary_name(Path(name)))  # OSError if it is too long
    return Path(name)


def check_distinct(key: str, files: Iterable[Path | None]) -> None:
    """Raises UserError if two points of a sweep would write the same new file."""
    for path, points in Counter(file for file in files if file is not None).items():
        if points > 1:
            raise UserError(
                f"{key}={path}: {points} points of the sweep share it, each must name its own"
            )


def resolve_evaluation(composed: Composed) -> WeightsTask:
    """Returns the checked settings of one evaluation; UserError as for `resolve_export`."""
    raw = dict(composed.raw)
    new = raw.get("predictions")
    predictions = None if new is None else _new_file("predictions", new, ".csv")
    images = raw.get("images")
    keys = EVALUATED_RUN if images is None else PREDICTED_RUN
    files, saved = _select_weights(composed, raw, keys, EVALUATED_FILE)
    file = files[0]
    if images is not None and saved is not None:
        return _predicting(images, files, predictions, _apply_overrides(saved, raw, composed))
    if saved is not None:
        named = "dataset.source" in composed.overrides
        config = parse_saved(_apply_overrides(deepcopy(saved), raw, composed), named=named)
        folder = file.parent if file.name == PUBLISHED else file.parents[1]
        name = f"evaluation-{file.stem}"
        before = parse_saved(saved, needs_data=False)
        if images_of(config) != images_of(before):
            name += f"-{config.dataset.name}-{short_digest(images_of(config))}"
        result = folder / f"{name}.json"
        check_writable(result, f"{folder}")
        return WeightsTask(config, files, result, predictions)
    config = parse(raw, trains=False)
    _check_source(config, composed)
    name = f"{file.stem}-{config.model.name}-{config.dataset.name}"
    digest = short_digest([str(file.resolve()), *images_of(config)])
    result = Path(config.output_root, "evaluations", f"{name}-{digest}.json")
    check_writable(result, f"output_root={config.output_root}")
    return WeightsTask(config, files, result, predictions)


def _predicting(
    images: Any, files: list[Path], predictions: Path | None, saved: dict[str, Any]
) -> WeightsTask:
    """The task of a folder without classes, which needs no data set."""
    folder = Path(os.path.expanduser(str(images)))
    if not folder.is_dir():
        raise UserError(f"images={images}: there is no such folder")
    if predictions is None:
        raise UserError(f"images={images}: needs predictions=FILE.csv, the file to write")
    config = parse_saved(saved, needs_data=False)
    return WeightsTask(config, files, predictions, predictions, folder)


def images_of(config: Config) -> list[Any]:
    """Returns the settings that identify the held-out images and their normalisation."""
    data = config.dataset
    limit = [] if data.eval_limit is None else [data.eval_limit]
    own = [data.source, data.options] if data.is_own else []
    root = data.root and plain_path(data.root)
    return [data.name, root, data.mean, data.std, *limit, *own]


def _select_weights(
    composed: Composed, raw: dict[str, Any], run_keys: Keys, file_keys: Keys
) -> tuple[list[Path], dict[str, Any] | None]:
    """Returns candidate weight files (the first readable one is used) and their saved config.

    Removes the keys of eval.yaml alone from `raw`. Raises UserError for overrides of keys or groups
    outside `run_keys` for a run, or outside `file_keys` for a file.
    """
    raw.pop("predictions", None)
    raw.pop("images", None)
    run, weights, checkpoint = (raw.pop(key, None) for key in ("run", "weights", "checkpoint"))
    for key, value in (("run", run), ("checkpoint", checkpoint)):
        if isinstance(value, dict | list | bool):
            raise UserError(f"{key}={value}: must be a path")
    if (run is None) == (checkpoint is None):
        _check_allowed(composed, tuple(dict.fromkeys(run_keys + file_keys)))
        both = "run, checkpoint" if run is None else f"run={run}, checkpoint={checkpoint}"
        raise UserError(f"{both}: set exactly one of them, a run folder or a file")
    if run is not None:
        _check_allowed(composed, run_keys)
        folder = RunFolder(str(run))
        saved = folder.read_config()
        return folder.weights(weights), saved
    path = Path(str(checkpoint))
    if path.is_dir():
        if not (path / PUBLISHED).is_file():
            raise UserError(f"checkpoint={checkpoint}: the folder holds no {PUBLISHED}")
        folder_keys = (key for key in run_keys if key not in ("run", "weights"))
        _check_allowed(composed, ("checkpoint", *folder_keys))
        return [path / PUBLISHED], RunFolder(path).read_config()
    _check_allowed(composed, file_keys)
    if not path.is_file():
        raise UserError(f"checkpoint={checkpoint}: there is no such file")
    return [path], None


def _check_allowed(composed: Composed, allowed: Keys) -> None:
    for key, text in composed.overrides.items():
        if key in TRAINING_ONLY:
            raise UserError(f"{text}: not allowed here, it only limits the images for training")
        if not ({key, key.partition(".")[0]} & {*allowed} or key.startswith("hydra")):
            raise UserError(f"{text}: not allowed here, allowed are {', '.join(allowed)}")


def _apply_overrides(
    saved: dict[str, Any], raw: dict[str, Any], composed: Composed
) -> dict[str, Any]:
    """Applies overrides of CHANGEABLE to the saved configuration of a run.

    Without overrides, devices is 1, and mean and std are those of the training run.
    """
    saved["devices"] = 1
    for key, text in composed.overrides.items():
        head, _, leaf = key.partition(".")
        if not {key, head} & {*CHANGEABLE}:
            continue
        name = leaf.partition(".")[0]
        is_known = head in raw and (not name or name in raw[head])
        if not is_known or not all(isinstance(saved.get(x), dict) for x in ("dataset", "recipe")):
            raise UserError(f"{text}: cannot be applied to this run")
        if name == "options":  # added to those of the run
            saved[head][name] = {**saved[head].get(name, {}), **raw[head][name]}
        elif name:
            saved[head][name] = raw[head][name]
        elif head == "dataset":
            statistics = {
                key: saved[head].get(key)
                for key in ("mean", "std")
                if f"{head}.{key}" not in composed.overrides
            }
            saved[head] = raw[head] | statistics
        else:
            saved[head] = raw[head]
    return saved
