"""JSON and YAML that a run may have written, or a person, another program or a bad disk."""

import json
from typing import Any, NoReturn

import yaml


def parse_json(text: str | bytes) -> Any:
    """A value; ValueError for what we never write: NaN, a key twice, 1,000 brackets."""
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def parse_yaml(text: str) -> Any:
    """A value; ValueError for what we never write: aliases, tags, a key twice, 1,000 brackets."""
    try:
        return yaml.load(text, _Plain)  # noqa: S506 - a SafeLoader that reads less
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


class _Plain(yaml.SafeLoader):
    """Without aliases, of which a few lines can name billions of values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("holds an alias")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        _once(
            [(key.value if isinstance(key, yaml.ScalarNode) else "?", 0) for key, _ in node.value]
        )
        return super().construct_mapping(node, deep)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("holds a key twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"holds {name}")
