"""The identity of a run: the settings that distinguish it from others, their hash, its name."""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from reproduction.config import Config
from reproduction.data.folders import DATASETS

NOT_IN_NAMES = re.compile(r"[^\w.+=-]+", re.ASCII)  # what a default name leaves out
LONGEST_DEFAULT_NAME = 120  # bytes of a default name
# Keys that do not change a result, and so not the identity of a run.
NOT_IDENTITY = (
    *("name", "output_root", "resume", "device", "compile", "restarts", "checkpoint", "logger"),
    *("dataset.workers", "dataset.memory_mib", "dataset.statistics", "model.checkpoint_blocks"),
)
PATHS = ("dataset.root", "model.weights")  # keys that count however they are spelled
# Key -> its first default, if the schema now has another one: what configurations without it mean.
FIRST_DEFAULTS: dict[str, Any] = {"augmentation.htm.tau": 2.0, "augmentation.htm.rho": 0.005}
# Key of earlier revisions -> its value in a run that the present code trains as they did.
REMOVED: dict[str, Any] = {
    "restarts": 0,
    "checkpoint.every_steps": None,
    "recipe.non_finite": "fail",
    "augmentation.htm.non_finite": "fail",
    "augmentation.mode": "batch",
}
HASHED = ("recipe.non_finite",)  # those that had no default, so that every hash covers them


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, leaf) of nested mappings."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the dotted keys and values that determine a result.

    The folder of a fixed data set is not among them, as its images may be moved. Other paths are
    those of `plain_path`, also in configurations that were saved as typed.
    """
    values = dict(flatten(config))
    fixed = [name for name, entry in DATASETS.items() if entry.sizes is not None]
    is_fixed = values.get("dataset.name") in fixed  # a list: a broken file's may be unhashable
    return {
        key: plain_path(value) if key in PATHS and isinstance(value, str) else value
        for key, value in values.items()
        if changes_result(key) and not (is_fixed and key == "dataset.root")
    }


def plain_path(path: str) -> str:
    """Returns the path from the working folder if it lies there, however reached, else absolute."""
    whole = Path(os.path.abspath(path))
    for folder in (whole, *whole.parents):
        with suppress(OSError):  # there is no such folder
            if folder.samefile("."):
                return str(whole.relative_to(folder))
    return str(whole)


def changes_result(key: str) -> bool:
    """Whether a dotted key may distinguish runs."""
    return not any(key == name or key.startswith(f"{name}.") for name in NOT_IDENTITY)


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that distinguish runs: those that differ from what omitting them means.

    So a new option, whose default is the behaviour of before, leaves all earlier runs as they are.
    An optional group that is set counts even if all of its settings are left out.
    """
    values, omitted = settings_of(config), omitted_values()
    groups = [key for key, value in omitted.items() if value is None]
    return {
        **{key: "set" for key in groups if any(name.startswith(f"{key}.") for name in values)},
        **{key: value for key, value in values.items() if value != omitted.get(key, ...)},
    }


@cache
def omitted_values() -> dict[str, Any]:
    """Dotted key -> what a configuration without it means, for all keys with a default."""
    options = dict(options_of(Config)) | FIRST_DEFAULTS | REMOVED
    return {key: value for key, value in options.items() if value is not dataclasses.MISSING}


def options_of(hint: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys and defaults of all dataclasses in a type, such as a union's."""
    if not (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
        for part in get_args(hint):
            yield from options_of(part, key)
        return
    types = get_type_hints(hint)
    for option in dataclasses.fields(hint):
        name, default = f"{key}{option.name}", option.default
        yield name, [*default] if isinstance(default, tuple) else default
        yield from options_of(types[option.name], f"{name}.")


def with_first_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Adds the missing keys whose default in the schema has changed since they were left out."""
    for key, value in FIRST_DEFAULTS.items():
        *groups, name = key.split(".")
        group: Any = config
        for part in groups:
            group = group.get(part) if isinstance(group, dict) else None
        if isinstance(group, dict):
            group.setdefault(name, value)
    return config


def without_removed(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a saved configuration without the keys that the schema has no more."""
    return {
        key: without_removed(value, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in config.items()
        if f"{prefix}{key}" not in REMOVED
    }


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Returns `key=ours instead of theirs` for each difference of two identities."""
    pairs = []
    for key in sorted({*ours, *theirs}):
        omitted = omitted_values().get(key, "no value")
        our, their = ours.get(key, omitted), theirs.get(key, omitted)
        pairs += [f"{key}={our} instead of {their}"] if our != their else []
    return pairs


def differing_data(then: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Says in what two records of data/record.py differ; None if in nothing that both have."""
    texts = [f"{then[x]} then, {now[x]} now" for x in then if x in now and then[x] != now[x]]
    return ", ".join(texts) or None


def run_hash(config: Config) -> str:
    """Returns 8 hex digits over the identity of the configuration."""
    return hash_of(dataclasses.asdict(config))


def hash_of(config: dict[str, Any]) -> str:
    """`run_hash` for plain values, such as a saved configuration."""
    return short_digest({key: REMOVED[key] for key in HASHED} | identity(config))


def short_digest(value: Any) -> str:
    """Returns 8 hex digits over the JSON of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def default_name(config: Config, experiment: str | None, changes: Sequence[str] = ()) -> str:
    """Returns `<experiment or model-dataset-stack>[-key=value...]-s<seed>-<hash>`.

    `changes` are typed overrides; the last part of each key is named, in plain characters, as far
    as LONGEST_DEFAULT_NAME allows.
    """
    stack = "+".join(config.augmentation.stack) or "plain"
    head = f"{config.model.name}-{config.dataset.name}-{stack}"
    if experiment is not None:
        head = experiment.replace("/", "-")
    tail = f"-s{config.seed}-{run_hash(config)}"
    for text in changes:
        key, _, value = text.lstrip("+~").partition("=")
        value = value.replace(",", "+")  # in run=NAME a comma would mean several values
        head += "-" + NOT_IN_NAMES.sub("", f"{key.rpartition('.')[2]}={value}")
    return head.encode()[: LONGEST_DEFAULT_NAME - len(tail)].decode(errors="ignore") + tail
