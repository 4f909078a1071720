"""What a run is: the settings that change its result, as the present schema reads them."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from reproduction.config import (
    DATA,
    DATA_SETS,
    HTM_RULES,
    LOSS,
    METRIC,
    MIXING,
    MODEL,
    OPTIMIZER,
    SOURCES,
    Command,
    Config,
    Own,
    validated,
)
from reproduction.door import Door, file_of
from reproduction.errors import UserError, as_typed

# Keys that do not change a result, and so not the identity of a run.
NOT_RESULT = (
    *Command.__annotations__,  # how the points of a command are run
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
    "recipe.metrics",
    "recipe.metrics_options",
)
PATHS = ("dataset.root", "model.weights")  # relative ones stay so: a project may be moved

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
# What a saved configuration without the key meant. Conf may have another default today.
COUNTED_DEFAULTS = {  # of keys that are in the hash of every run, or in that of its name
    "augmentation.htm.tau": 2.0,
    "augmentation.htm.rho": 0.005,
    "recipe.log_every": 50,  # which published lines leave out
}
# A new key of the schema is entered here, with the value by which runs are what they were before
# it. At this value it is in no hash, so that their folders keep their names.
FIRST_DEFAULTS: dict[str, Any] = {
    "recipe.drop_last": False,
    "recipe.loss": "cross_entropy",
    "model.htm_layer": None,
    "model.vtm_layer": None,
}


def saved(raw: Mapping[str, Any]) -> Config:
    """Returns a saved configuration of any revision as the present schema understands it.

    Raises UserError for a setting that the present code does not have any more.
    """
    values = dict(flat(raw))
    for key, held in GONE.items():
        if key not in values:
            continue
        value = values.pop(key)
        if held is not None and value not in held:
            raise UserError(f"{key}={value}: was a setting of an earlier revision, and is gone")
    for key, value in (COUNTED_DEFAULTS | FIRST_DEFAULTS).items():
        group, _, _ = key.rpartition(".")
        if any(name.startswith(f"{group}.") for name in values):  # a run may have no htm
            values.setdefault(key, value)
    if values.get("dataset.source") is None:  # was set for data of one's own alone
        values["dataset.source"] = f"{SOURCES}:{values['dataset.name']}"
    return validated(Config, nested(values))


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

    The folder of a fixed data set is not among them, as its images may be moved. Under another
    label it counts: such runs were always named by it.
    """
    counted = {key: value for key, value in flat(asdict(config)) if changes_result(key)}
    dataset = config.dataset
    if dataset.fixed is not None and dataset.source == DATA.path(dataset.name):
        del counted["dataset.root"]
    for key in PATHS:
        if counted.get(key) is not None:
            counted[key] = os.path.normpath(counted[key])  # `data/x/` is `data/x`
    return counted


def digest(value: Any) -> str:
    """Returns 8 hex digits over the JSON of a value: its hash."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def counted_settings(config: Config) -> dict[str, Any]:
    """Returns the settings that hashes are over: not those at their first default."""
    counted = settings(config)
    for key, value in FIRST_DEFAULTS.items():
        if key in counted and counted[key] == value:
            del counted[key]
    return counted


def settings_of_evaluation(config: Config) -> dict[str, Any]:
    """Returns the settings that the result of evaluating weights depends on."""
    parts = ("model.", "dataset.", "recipe.precision")
    counted = counted_settings(config)
    return {key: value for key, value in counted.items() if key.startswith(parts)}


def run_hash(config: Config) -> str:
    """Returns the hash of the settings: two runs with the same one are the same run."""
    return digest(counted_settings(config))


def former_hash(config: Config) -> str:
    """Returns the `run_hash` of revisions that knew a fixed data set by its label alone."""
    counted = counted_settings(config)
    if DATA_SETS.get(config.dataset.name) is not None:
        counted.pop("dataset.root", None)
    return digest(counted)


def row_hash(config: Config) -> str:
    """Returns the hash of the settings but for the seed, which the runs of all seeds share."""
    counted = counted_settings(config)
    del counted["seed"]
    return digest(counted)


def name_hash(config: Config) -> str:
    """Returns the hash that ends the name of a folder.

    Not `run_hash`: the names of earlier revisions, which stay, count these two settings as well.
    """
    counted = counted_settings(config)
    counted["recipe.log_every"] = config.recipe.log_every
    if config.augmentation.cutmix is not None:
        counted["augmentation.cutmix.labels"] = "area"  # a key that is gone
    return digest(counted)


def chosen_code(config: Config) -> Iterator[tuple[Door, str]]:
    """Yields each key that chooses a function, as its door, and what it chooses.

    In the order of the schema, in which runs record their code.
    """
    stack, recipe = config.augmentation, config.recipe
    if isinstance(config.model, Own):
        yield MODEL, config.model.source
    yield DATA, config.dataset.source
    for name, mix in stack.own.items():
        yield MIXING.at(name), mix.source
    if stack.htm is not None:
        for name, door in HTM_RULES.items():
            yield door, getattr(stack.htm, name)
    yield OPTIMIZER, recipe.optimizer
    yield LOSS, recipe.loss
    for name, metric in recipe.metrics.items():
        yield METRIC.at(name), metric


def own_code(config: Config) -> list[tuple[Door, str]]:
    """Returns the paths of code from elsewhere that a run names, with their doors."""
    return [(door, chosen) for door, chosen in chosen_code(config) if door.is_own(chosen)]


def files_of_code(config: Config) -> dict[str, str]:
    """Returns the file of each path of `own_code`: what a run must have to be resumed."""
    found = {}
    for door, path in own_code(config):
        with door.refusing(path):
            found[door.key] = file_of(path)
    return found


def changes(ours: Config, theirs: Config) -> str:
    """Returns `key=ours instead of theirs` for each setting that distinguishes two runs."""
    one = settings(ours)
    other = settings(theirs)
    return ", ".join(
        f"{key}={as_typed(one.get(key))} instead of {as_typed(other.get(key))}"
        for key in sorted(one | other)
        if one.get(key) != other.get(key)
    )
