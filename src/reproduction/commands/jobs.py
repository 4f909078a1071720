"""What train.py, eval.py and export.py make of each point of their command lines, checked."""

import dataclasses
import os
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.config import Config
from reproduction.runs.compose import Composed
from reproduction.runs.folder import RunFolder, check_writable, default_name, short_digest
from reproduction.runs.parse import parse, parse_saved
from reproduction.system.errors import UserError

Keys = tuple[str, ...]
PUBLISHED = "model.safetensors"  # in a folder that scripts/publish.py writes
EVALUATED_RUN: Keys = ("run", "weights", "device", "devices", "dataset")
EVALUATED_FILE: Keys = (
    *("checkpoint", "device", "devices", "model", "dataset", "recipe", "output_root"),
)
EXPORTED_RUN: Keys = ("run", "weights", "output")
EXPORTED_FILE: Keys = ("checkpoint", "model", "output")


def resolve(composed: Composed) -> Config:
    """The typed configuration of one point, with the name of its run."""
    config = parse(composed.raw)
    name = config.name or default_name(config, composed.experiment)
    return dataclasses.replace(config, name=name)


def check_all(configs: list[Config], here: bool = True) -> None:
    """Refuses what keeps any point from running, before the first one starts.

    The devices of runs that will not be `here` are left to the machine that they will be on.
    """
    folders = [RunFolder.of(config) for config in configs]
    for folder, config in zip(folders, configs, strict=True):
        folder.check(config)
    path, points = Counter(folder.path for folder in folders).most_common(1)[0]
    if points > 1:
        raise UserError(
            f"name={path.name}: {points} points of the sweep are this one run, leave name out and "
            "sweep over what changes a result"
        )
    from reproduction.training.preflight import preflight  # torch: only when all else is right

    for folder, config in zip(folders, configs, strict=True):
        if not folder.is_finished():
            preflight(config, here)


@dataclass(frozen=True)
class WeightsTask:
    """Checkpoints, of which the first readable one counts, their configuration, and the result."""

    config: Config
    checkpoints: list[Path]
    result: Path


def resolve_export(composed: Composed) -> WeightsTask:
    """The checked settings of one export; UserError names what does not belong to it."""
    raw = dict(composed.raw)
    output = _new_file(raw.pop("output", None))
    checkpoints, saved = _chosen_weights(composed, raw, EXPORTED_RUN, EXPORTED_FILE)
    return WeightsTask(parse_saved(saved or raw, needs_data=False), checkpoints, output)


def _new_file(output: Any) -> Path:
    if not isinstance(output, str) or not output.endswith(".safetensors"):
        raise UserError(f"output={output}: must be a file ending in .safetensors")
    if os.path.lexists(output):
        raise UserError(f"output={output}: exists already")
    check_writable(Path(output), f"output={output}")
    return Path(output)


def resolve_evaluation(composed: Composed) -> WeightsTask:
    """The checked settings of one evaluation; UserError names what does not belong to it."""
    raw = dict(composed.raw)
    files, saved = _chosen_weights(composed, raw, EVALUATED_RUN, EVALUATED_FILE)
    file = files[0]
    if saved is not None:
        config = parse_saved(_overridden(deepcopy(saved), raw, composed))
        folder = file.parent if file.name == PUBLISHED else file.parents[1]
        name = f"evaluation-{file.stem}"
        if images_of(config) != images_of(parse_saved(saved, needs_data=False)):
            name += f"-{config.dataset.name}-{short_digest(images_of(config))}"
        result = folder / f"{name}.json"
        check_writable(result, f"{folder}")
        return WeightsTask(config, files, result)
    config = parse(raw, trains=False)
    name = f"{file.stem}-{config.model.name}-{config.dataset.name}"
    told = short_digest([str(file.resolve()), *images_of(config)])
    result = Path(config.output_root, "evaluations", f"{name}-{told}.json")
    check_writable(result, f"output_root={config.output_root}")
    return WeightsTask(config, files, result)


def images_of(config: Config) -> list[Any]:
    """What tells one set of held-out images, and how the model sees them, from another."""
    data = config.dataset
    return [data.name, data.root, data.mean, data.std]


def _chosen_weights(
    composed: Composed, raw: dict[str, Any], of_a_run: Keys, of_a_file: Keys
) -> tuple[list[Path], dict[str, Any] | None]:
    """(files of weights, of which the first readable one counts; their run's own configuration).

    Takes run, weights and checkpoint out of `raw`. Raises UserError for what was typed besides the
    keys and groups that belong to a run, or to a file.
    """
    run, weights, checkpoint = (raw.pop(key, None) for key in ("run", "weights", "checkpoint"))
    for key, value in (("run", run), ("checkpoint", checkpoint)):
        if isinstance(value, dict | list | bool):
            raise UserError(f"{key}={value}: must be a path")
    if (run is None) == (checkpoint is None):
        both = "run, checkpoint" if run is None else f"run={run}, checkpoint={checkpoint}"
        raise UserError(f"{both}: give one of them, a run folder or a file")
    if weights not in ("last", "best"):
        raise UserError(f"weights={weights}: must be last or best")
    if run is not None:
        _refuse_others(composed, of_a_run)
        return _weights_of_run(RunFolder(str(run)), is_best=weights == "best")
    path = Path(str(checkpoint))
    if path.is_dir():
        if not (path / PUBLISHED).is_file():
            raise UserError(f"checkpoint={checkpoint}: holds no {PUBLISHED}, as a folder must")
        of_a_folder = (key for key in of_a_run if key not in ("run", "weights"))
        _refuse_others(composed, ("checkpoint", *of_a_folder))
        return [path / PUBLISHED], RunFolder(path).read_config()
    _refuse_others(composed, of_a_file)
    if not path.is_file():
        raise UserError(f"checkpoint={checkpoint}: there is no such file")
    return [path], None


def _weights_of_run(folder: RunFolder, is_best: bool) -> tuple[list[Path], dict[str, Any]]:
    saved = folder.read_config()
    newest = folder.best_path if is_best else folder.last_path
    found = folder.checkpoints() if not is_best else [newest] if newest.is_file() else []
    if not found:
        raise UserError(f"run={folder.path}: holds no {newest.name} yet")
    return found, saved


def _refuse_others(composed: Composed, allowed: Keys) -> None:
    for key, text in composed.overrides.items():
        if key.partition(".")[0] not in (*allowed, "hydra") or key == "dataset.limit":
            raise UserError(f"{text}: does not belong here, allowed are {', '.join(allowed)}")


def _overridden(saved: dict[str, Any], typed: dict[str, Any], composed: Composed) -> dict[str, Any]:
    """The run's own configuration with the device and the data set that were typed.

    One device unless more are typed, and the mean and std by which the model was trained.
    """
    saved["devices"] = 1
    for key, text in composed.overrides.items():
        head, _, leaf = key.partition(".")
        if head not in ("device", "devices", "dataset"):
            continue
        name = leaf.partition(".")[0]
        known = head in typed and (not name or name in typed[head])
        if not known or not isinstance(saved.get("dataset"), dict):
            raise UserError(f"{text}: cannot be applied to this run")
        if name:
            saved[head][name] = typed[head][name]
        elif head == "dataset":
            own = {key: saved[head].get(key) for key in ("mean", "std")}
            told = {key for key in own if f"{head}.{key}" in composed.overrides}
            saved[head] = typed[head] | {key: own[key] for key in own.keys() - told}
        else:
            saved[head] = typed[head]
    return saved
