"""The identity of a run: the settings that change its result, their hash, its name.

A saved configuration of any revision is upgraded and parsed by the present schema before it is
compared. So a new key needs a default that is the behaviour of before, and nothing else; a key that
goes, or whose default changes, needs one entry of UPGRADES.
"""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from reproduction.config import SOURCES, Config
from reproduction.runs.parse import typed
from reproduction.system.errors import UserError

NOT_IN_NAMES = re.compile(r"[^\w.+=-]+", re.ASCII)  # what a default name leaves out
LONGEST_DEFAULT_NAME = 120  # bytes of a default name
# Keys that do not change a result, and so not the identity of a run.
NOT_IDENTITY = (
    *("name", "output_root", "resume", "device", "compile", "checkpoint", "logger"),
    *("dataset.workers", "dataset.memory_mib", "model.checkpoint_blocks"),
)
FIXED = ["digits", "cifar10", "cifar100", "imagenet1k"]  # data sets whose images are known
PATHS = ("dataset.root", "model.weights")  # keys that count however they are spelled


class Gone:
    """A key that the schema has no more, and its values (any, if none is named) that still hold."""

    def __init__(self, *values: Any):
        self.values = values


# What saved configurations mean: keys that are gone, and first defaults of keys that have another.
UPGRADES: dict[str, Any] = {
    "restarts": Gone(),
    "checkpoint.every_steps": Gone(),
    "recipe.non_finite": Gone("fail"),
    "augmentation.htm.non_finite": Gone("fail"),
    "augmentation.mode": Gone("batch"),
    "dataset.broken_images": Gone("refuse"),
    "dataset.content": Gone(),
    "dataset.statistics": Gone(None),
    "augmentation.htm.tau": 2.0,
    "augmentation.htm.rho": 0.005,
}


def upgraded(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a saved configuration in the keys of the present schema.

    Raises UserError for a setting that the present code does not have any more.
    """
    tree = deepcopy(dict(raw))
    for key, value in UPGRADES.items():
        *groups, name = key.split(".")
        group: Any = tree
        for part in groups:
            group = group.get(part) if isinstance(group, dict) else None
        if not isinstance(group, dict):
            continue
        if not isinstance(value, Gone):
            group.setdefault(name, value)
        elif name in group and (found := group.pop(name)) not in (value.values or [found]):
            raise UserError(f"{key}={found}: was a setting of an earlier revision, and is gone")
    data = tree.get("dataset")
    if isinstance(data, dict) and data.get("source") is None:  # once named for own data alone
        data["source"] = f"{SOURCES}:{data.get('name')}"
    return tree


def saved(raw: Mapping[str, Any]) -> Config:
    """Returns a saved configuration of any revision as the present schema understands it."""
    return typed(upgraded(raw))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, leaf) of nested mappings."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `flatten`."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *groups, name = key.split(".")
        group = tree
        for part in groups:
            group = group.setdefault(part, {})
        group[name] = value
    return tree


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the dotted keys and values that determine a result.

    The folder of a fixed data set is not among them, as its images may be moved.
    """
    values = dict(flatten(config))
    is_fixed = values.get("dataset.name") in FIXED
    return {
        key: plain_path(value) if key in PATHS and isinstance(value, str) else value
        for key, value in values.items()
        if changes_result(key) and not (is_fixed and key == "dataset.root")
    }


def plain_path(path: str) -> str:
    """Returns the path from the working folder if it lies there, else the absolute one."""
    short = os.path.relpath(path)
    return os.path.abspath(path) if short.split(os.sep)[0] == ".." else short


def changes_result(key: str) -> bool:
    """Whether a dotted key may distinguish runs."""
    return not any(key == name or key.startswith(f"{name}.") for name in NOT_IDENTITY)


def differing(ours: Config, theirs: Config) -> list[str]:
    """Returns `key=ours instead of theirs` for each setting that distinguishes two runs."""
    one, other = (settings_of(dataclasses.asdict(config)) for config in (ours, theirs))
    return [
        f"{key}={one.get(key)} instead of {other.get(key)}"
        for key in sorted({*one, *other})
        if one.get(key) != other.get(key)
    ]


def differing_data(then: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Says in what two records of data/record.py differ; None if in nothing that both have."""
    texts = [f"{then[x]} then, {now[x]} now" for x in then if x in now and then[x] != now[x]]
    return ", ".join(texts) or None


def run_hash(config: Config) -> str:
    """Returns 8 hex digits over the settings that determine a result."""
    return short_digest(settings_of(dataclasses.asdict(config)))


def hash_of(raw: Mapping[str, Any]) -> str:
    """`run_hash` of a saved configuration; UserError if the present code does not understand it."""
    return run_hash(saved(raw))


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
