"""What a run is: the settings that change its result, as the present schema reads them."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from reproduction.config import SOURCES, Config, parse

# Keys that do not change a result, and so not the identity of a run.
NOT_RESULT = (
    "name",
    "output_root",
    "resume",
    "device",
    "compile",
    "checkpoint",
    "logger",
    "dataset.workers",
    "model.checkpoint_blocks",
    "recipe.log_every",
)
FIXED = ("digits", "cifar10", "cifar100", "imagenet1k")  # data sets whose images are known
PATHS = ("dataset.root", "model.weights")  # count as typed: a project may be moved

# --- saved configurations -----------------------------------------------------------------------

# Keys that the schema has no more, and their values that still hold; None: all of them.
GONE: dict[str, list[Any] | None] = {
    "recipe.non_finite": ["fail"],
    "augmentation.htm.non_finite": ["fail"],
    "augmentation.mode": ["batch"],
    "augmentation.cutmix.labels": ["area"],
    "dataset.broken_images": ["refuse"],
    "dataset.content": None,
    "model.drop": [0.0],
    "recipe.momentum": [0.9],
    "recipe.tf32": [False],
    "recipe.transforms.erasing_count": [1],
    "recipe.transforms.ratio": [[0.75, 1.3333], [1.0, 1.0]],
}
FIRST_DEFAULTS = {  # of keys that have another one now
    "augmentation.htm.tau": 2.0,
    "augmentation.htm.rho": 0.005,
    "recipe.log_every": 50,  # which published lines leave out
}


def saved(raw: Mapping[str, Any]) -> Config:
    """Returns a saved configuration of any revision as the present schema understands it.

    Raises ValueError for a setting that the present code does not have any more.
    """
    values = dict(flat(raw))
    for key, held in GONE.items():
        if key not in values:
            continue
        value = values.pop(key)
        if held is not None and value not in held:
            raise ValueError(f"{key}={value}: was a setting of an earlier revision, and is gone")
    for key, value in FIRST_DEFAULTS.items():
        group = key.rpartition(".")[0]
        if any(name.startswith(f"{group}.") for name in values):
            values.setdefault(key, value)
    if values.get("dataset.source") is None:  # once named for own data alone
        values["dataset.source"] = f"{SOURCES}:{values['dataset.name']}"
    return parse(nested(values))


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, leaf) of nested mappings."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `flat`."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *groups, name = key.split(".")
        group = tree
        for part in groups:
            group = group.setdefault(part, {})
        group[name] = value
    return tree


# --- identity -----------------------------------------------------------------------------------


def changes_result(key: str) -> bool:
    """Whether a dotted key may distinguish runs."""
    return not any(f"{key}.".startswith(f"{name}.") for name in NOT_RESULT)


def settings(config: Config) -> dict[str, Any]:
    """Returns the dotted keys and values that determine a result: the identity of a run.

    The folder of a fixed data set is not among them, as its images may be moved.
    """
    is_fixed = config.dataset.name in FIXED
    counted = {}
    for name, value in flat(asdict(config)):
        if not changes_result(name) or (is_fixed and name == "dataset.root"):
            continue
        counted[name] = value
        if name in PATHS and value is not None:
            counted[name] = os.path.normpath(value)  # `data/x/` is `data/x`
    return counted


def evaluated(config: Config) -> dict[str, Any]:
    """Returns the settings that the result of evaluating weights depends on."""
    parts = ("model.", "dataset.", "recipe.precision")
    return {name: value for name, value in settings(config).items() if name.startswith(parts)}


def digest(value: Any) -> str:
    """Returns 8 hex digits over the JSON of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def key(config: Config, seed: bool = True) -> str:
    """Returns 8 hex digits over `settings`; without the seed, those that all seeds share."""
    counted = settings(config)
    if not seed:
        del counted["seed"]
    return digest(counted)


def mark(config: Config) -> str:
    """Returns the 8 hex digits of a folder's name, which count what they have always counted."""
    counted = {**settings(config), "recipe.log_every": config.recipe.log_every}
    if config.augmentation.cutmix is not None:
        counted["augmentation.cutmix.labels"] = "area"  # a key that is gone
    return digest(counted)


def changes(ours: Config, theirs: Config) -> list[str]:
    """Returns `key=ours instead of theirs` for each setting that distinguishes two runs."""
    one, other = settings(ours), settings(theirs)
    return [
        f"{name}={one.get(name)} instead of {other.get(name)}"
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    ]


@dataclass(frozen=True, order=True)
class RowId:
    """What identifies a row of a table, whatever its text.

    A row has the name that its `study` gives it, and in a sweep a `point`: swept keys and values.
    """

    study: str = ""  # as typed: table1, or the path of a file
    row: str = ""
    point: tuple[tuple[str, str], ...] = ()
    column: str = ""
