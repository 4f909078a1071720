"""Strict parsers for JSON and YAML files that may be edited or damaged."""

import json
from typing import Any, NoReturn

import yaml


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. Raises ValueError for NaN, duplicate keys and excessive nesting."""
    try:
        return json.loads(text, object_pairs_hook=_unique_dict, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def parse_yaml(text: str) -> Any:
    """Parses YAML. Raises ValueError for aliases, tags, duplicate keys and excessive nesting."""
    try:
        return yaml.load(text, _StrictLoader)  # noqa: S506 - a restricted SafeLoader
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


class _StrictLoader(yaml.SafeLoader):
    """Rejects duplicate keys, and aliases, which expand a few lines to billions of values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("holds an alias")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        _unique_dict(
            [(key.value if isinstance(key, yaml.ScalarNode) else "?", 0) for key, _ in node.value]
        )
        return super().construct_mapping(node, deep)


def _unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("holds a key twice")
    return mapping


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"holds {name}")
