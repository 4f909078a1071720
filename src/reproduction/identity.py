"""What a run is: the settings that change its result, as the present schema reads them."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from reproduction.config import (
    DATA,
    HTM_RULES,
    LOSS,
    METRIC,
    MIXING,
    MODEL,
    OPTIMIZER,
    Command,
    Config,
    Own,
)
from reproduction.errors import as_typed
from reproduction.function_keys import FunctionKey, file_of

# Keys that do not change a result, and so not the identity of a run.
NOT_RESULT = (
    *Command.__annotations__,  # how the runs of a command are started
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


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, leaf) of nested mappings."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def changes_result(key: str) -> bool:
    """Whether a dotted key may distinguish runs."""
    return not any(f"{key}.".startswith(f"{name}.") for name in NOT_RESULT)


def settings(config: Config) -> dict[str, Any]:
    """Returns the dotted keys and values that determine a result: the identity of a run.

    The folder of a fixed data set is not among them, as its images may be moved.
    """
    counted = {key: value for key, value in flat(asdict(config)) if changes_result(key)}
    if config.dataset.fixed is not None:
        del counted["dataset.root"]
    return counted


def digest(value: Any) -> str:
    """Returns 8 hex digits over the JSON of a value: its hash."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def settings_of_evaluation(config: Config) -> dict[str, Any]:
    """Returns the settings that the result of evaluating weights depends on."""
    parts = ("model.", "dataset.", "recipe.precision")
    counted = settings(config)
    return {key: value for key, value in counted.items() if key.startswith(parts)}


def run_hash(config: Config) -> str:
    """Returns the hash of the settings: two runs with the same one are the same run."""
    return digest(settings(config))


def row_hash(config: Config) -> str:
    """Returns the hash of the settings but for the seed, which the runs of all seeds share."""
    counted = settings(config)
    del counted["seed"]
    return digest(counted)


def chosen_code(config: Config) -> list[tuple[FunctionKey, str]]:
    """Returns each key that chooses a function, and what it chooses."""
    stack, recipe = config.augmentation, config.recipe
    found = [
        (DATA, config.dataset.source),
        *((MIXING.at(name), mix.source) for name, mix in stack.own.items()),
        (OPTIMIZER, recipe.optimizer),
        (LOSS, recipe.loss),
        *((METRIC.at(name), metric) for name, metric in recipe.metrics.items()),
    ]
    if isinstance(config.model, Own):
        found.append((MODEL, config.model.source))
    if stack.htm is not None:
        found += [(key, getattr(stack.htm, name)) for name, key in HTM_RULES.items()]
    return found


def own_code(config: Config) -> list[tuple[FunctionKey, str]]:
    """Returns the paths of code from elsewhere that a run names, with their function keys."""
    return [
        (function_key, chosen)
        for function_key, chosen in chosen_code(config)
        if function_key.is_own(chosen)
    ]


def files_of_code(config: Config) -> dict[str, str]:
    """Returns the file of each path of `own_code`: what a run must have to be resumed."""
    found = {}
    for function_key, path in own_code(config):
        with function_key.refusing(path):
            found[function_key.key] = file_of(path)
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
