"""What the schema allows for each key, as text for `train.py --help`. Does not import torch."""

from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter

from reproduction.config import HUGE, Config
from tokenmixup import HTM, VTM, ManifoldMixup
from tokenmixup.settings import LARGEST, allowed_of

LIBRARY_SETTINGS = {kind.__name__: kind for kind in (HTM, VTM, ManifoldMixup)}
FAMILIES = {"CCT": "cct", "ViT": "vit", "Library": "library"}

SCHEMA_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
TYPE_NAMES = {"boolean": "true, false", "string": "text", "object": "mapping", "null": "null"}


def ranges(family: str) -> str:
    """Returns a line for each key; of the models' keys, those of this family."""
    schema = TypeAdapter(Config).json_schema()
    pairs = [*_ranges(schema, schema["$defs"], family)]
    width = max(len(key) for key, _ in pairs)
    return "\n".join(f"{key:{width}}  {text}" for key, text in pairs)


def _ranges(
    group: dict[str, Any], groups: dict[str, Any], family: str, prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Yields the dotted keys of a group, and what is allowed."""
    if (settings := LIBRARY_SETTINGS.get(group["title"])) is not None:
        for key, option in allowed_of(settings).items():
            yield prefix + key, option.allowed.removeprefix("one of ")
        return
    for key, value in group["properties"].items():
        parts = value.get("anyOf") or value.get("oneOf") or [value]
        inner = [part["$ref"].rpartition("/")[2] for part in parts if "$ref" in part]
        for name in inner:
            if FAMILIES.get(name, family) == family:
                yield from _ranges(groups[name], groups, family, f"{prefix}{key}.")
        if not inner:
            yield prefix + key, " or ".join(map(_range, parts))


def _range(value: dict[str, Any]) -> str:
    """Describes one type of a JSON schema."""
    if "const" in value or "enum" in value:
        return ", ".join(value.get("enum") or [value["const"]])
    if value["type"] == "array":
        return f"{value['minItems']} values: {_range(value['items'])}"
    if value["type"] not in ("integer", "number"):
        return TYPE_NAMES[value["type"]]
    limits = {word: value.get(key) for key, word in SCHEMA_BOUNDS.items()}
    texts = [f"{x} {y:.10g}" for x, y in limits.items() if y not in (None, HUGE, LARGEST)]
    return f"{value['type']} {' and '.join(texts)}"
