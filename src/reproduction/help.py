"""What is allowed: the options of the groups in conf/, and the values of each key by the schema."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter

from reproduction.config import CONF_DIR, Command, Config
from reproduction.identity import flat
from tokenmixup import HTM, VTM, ManifoldMixup
from tokenmixup.settings import allowed_of

GROUPS = ("model", "dataset", "augmentation", "recipe", "logger", "experiment")
TEXT = "string"  # with which `allowed` begins for a key that takes a text
BOUNDS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
    "minItems": "of",
}


def options_of(group: str) -> list[str]:
    """Returns the names of the files of a group."""
    folder = CONF_DIR / group
    return sorted(str(x.relative_to(folder).with_suffix("")) for x in folder.rglob("*.yaml"))


def help_text(config: Config) -> str:
    """Says which options the groups have, and what is allowed for each key, with its value."""
    values = dict(flat(asdict(config)))
    texts = allowed(config.model.family)
    width = max(map(len, texts))
    lines = ["Options of groups (files of conf/, whose comments say what the keys mean)"]
    lines += [f"  {group}: {', '.join(options_of(group))}" for group in GROUPS]
    lines += ["", "Allowed values, in brackets what these words give"]
    for name, text in texts.items():
        line = f"{name:{width}}  {text}"
        if name in values:
            line += f" [{values[name]}]"
        lines.append(line)
    return "\n".join(lines)


@lru_cache
def allowed(family: str = "") -> dict[str, str]:
    """Returns what the schema allows for each key; of the models' keys, those of a family."""
    found: dict[str, str] = {}
    for kind in (Command, Config):
        schema = TypeAdapter(kind).json_schema()
        found |= _allowed(schema, schema.get("$defs"), family, "")
    return found


def _allowed(group: Any, groups: Any, family: str, prefix: str) -> Iterator[tuple[str, str]]:
    """Yields the dotted keys of a group of a JSON schema, and what is allowed."""
    for kind in (HTM, VTM, ManifoldMixup):
        if group["title"] == kind.__name__:
            yield from ((prefix + x, option.allowed) for x, option in allowed_of(kind).items())
            return
    for name, value in group["properties"].items():
        parts = value.get("anyOf") or value.get("oneOf") or [value]
        inner = [groups[x["$ref"].rpartition("/")[2]] for x in parts if "$ref" in x]
        for each in inner:
            of = each["properties"].get("family", {}).get("const", family)
            if family in ("", of):
                yield from _allowed(each, groups, family, f"{prefix}{name}.")
        if not inner:
            yield prefix + name, " or ".join(map(_type, parts))


def _type(value: dict[str, Any]) -> str:
    """Describes one type of a JSON schema by its own words."""
    if "const" in value:
        return str(value["const"])
    if "enum" in value:
        return ", ".join(value["enum"])
    bounds = [f"{BOUNDS[name]} {x}" for name, x in value.items() if name in BOUNDS]
    return " ".join([value["type"], *bounds])
