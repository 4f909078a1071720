"""What tells one run from another, whatever its folder is called."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import Any

from reproduction.config.schema import Config

# What does not change a result does not change a run's identity.
NOT_IDENTITY = (
    *("name", "output_root", "resume", "device", "compile", "restarts", "checkpoint", "logger"),
    *("dataset.workers", "dataset.memory_mib"),
)


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, leaf) of nested mappings."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def identity(config: dict[str, Any]) -> dict[str, Any]:
    """The dotted keys that tell one run from another."""
    return {
        key: value
        for key, value in flatten(config)
        if not any(key == name or key.startswith(f"{name}.") for name in NOT_IDENTITY)
    }


def run_hash(config: Config) -> str:
    """8 hex digits over the resolved configuration."""
    return hash_of(dataclasses.asdict(config))


def hash_of(config: dict[str, Any]) -> str:
    """The same of plain values, such as a run's saved ones."""
    text = json.dumps(identity(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def default_name(config: Config, experiment: str | None) -> str:
    """`<experiment or model-dataset-stack>-s<seed>-<hash>`."""
    stack = "+".join(config.augmentation.stack) or "plain"
    head = f"{config.model.name}-{config.dataset.name}-{stack}"
    if experiment is not None:
        head = experiment.replace("/", "-")
    return f"{head}-s{config.seed}-{run_hash(config)}"
