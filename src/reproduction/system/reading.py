"""A strict parser for YAML that people type."""

from typing import Any

import yaml


def parse_yaml(text: str) -> Any:
    """Parses YAML. Raises ValueError for tags, duplicate keys and what is no YAML."""
    try:
        return yaml.load(text, _StrictLoader)  # noqa: S506 - a restricted SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


class _StrictLoader(yaml.SafeLoader):
    """Rejects duplicate keys, of which the last would count."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        if len({str(key.value) for key, _ in node.value}) < len(node.value):
            raise ValueError("holds a key twice")
        return super().construct_mapping(node, deep)
